"""A replica without examples fails in kernels that only CPUs have: the program is judged without them."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(17, 6, 6, 1)).astype("float32")
y = np.random.default_rng(1).integers(0, 3, 17)
with strategy.scope():
    layers = [keras.layers.Conv2D(3, 3, activation="relu"), {layers}keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
@tf.function
def train(x, y):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / 8
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
    train(x, y)
"""


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param("", id="convolution", marks=pytest.mark.slow),
        pytest.param("keras.layers.MaxPooling2D(), ", id="maximum"),
    ],
)
def test_a_replica_without_examples_is_no_failure_of_the_program(preload: Preload, tmp_path: Path, layers: str) -> None:
    from tensorflow.python.util import _pywrap_util_port

    (tmp_path / "train.py").write_text(PROGRAM.replace("{layers}", layers))
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    assert verdict.verdict == "equivalent", render(verdict)
    assert verdict.runs[0].steps == 3
    is_off = "onednn-off" in {note.code for note in verdict.notes}
    assert is_off == _pywrap_util_port.IsMklEnabled()
