"""A mask keeps Keras from synchronizing BatchNormalization: that is named, with a fix that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload

PROGRAM = """
import keras, numpy as np, tensorflow as tf
import gpudist_core as gd
draw = np.random.default_rng(0)
x, y = draw.integers(1, 20, size=(64, 8)), draw.normal(size=(64, 1)).astype("float32")
x[:, 5:] = 0
x[::3, 2:] = 0
with tf.distribute.MirroredStrategy().scope():
    words = keras.Input((8,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=True)(words)
    hidden = keras.layers.BatchNormalization(synchronized={synchronized})(hidden)
    model = keras.Model(words, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
    model = {model}
    model.compile("sgd", "mse")
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
"""


@pytest.mark.parametrize(
    ("synchronized", "model", "verdict"),
    [
        (True, "model", "by-design"),
        pytest.param(False, "model", "by-design", marks=pytest.mark.slow),
        (True, "gd.distributed(model)", "equivalent"),
    ],
)
def test_a_masked_layer_is_not_called_synchronized(
    tmp_path: Path, preload: Preload, synchronized: bool, model: str, verdict: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(synchronized=synchronized, model=model), encoding="utf-8")
    (run,) = emulate.verify(file, "1x2", preload=preload).runs
    assert run.verdict == verdict
    assert [cause.code for cause in run.causes] == ["batchnorm-local-statistics"] * (verdict == "by-design")
    assert all("gd.distributed" in cause.fix and "synchronized=True` changes nothing" in cause.fix for cause in run.causes)
