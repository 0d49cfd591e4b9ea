"""`--precision float64` and programs that are not made for it: what the option does is not the program's failure."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    scale = tf.Variable(np.float32(2))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(scale * model(x)) / 16
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss
@tf.function
def train(x):
    return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)
for x in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(16)):
    train(x)
"""


def verified(folder: Path, preload: Preload, program: str) -> emulate.Verdict:
    (folder / "train.py").write_text(program)
    return emulate.verify(folder / "train.py", "1x2", precision="float64", preload=preload)


def test_a_program_that_the_option_alone_makes_fail_is_unverified_and_told_so(tmp_path: Path, preload: Preload) -> None:
    verdict = verified(tmp_path, preload, PROGRAM)
    assert ([run.verdict for run in verdict.runs], verdict.exit_code) == (["unverified"], 1), render(verdict)
    assert "float64" in (verdict.runs[0].failure or "")
    assert any(note.startswith("--precision makes the program fail; without gpudist it runs") for note in verdict.notes)


@pytest.mark.slow
def test_a_program_that_fails_without_it_too_has_failed(tmp_path: Path, preload: Preload) -> None:
    verdict = verified(tmp_path, preload, PROGRAM.replace("scale * model(x)", "scale * tf.cast(model(x), tf.float64)"))
    assert ([run.verdict for run in verdict.runs], verdict.exit_code) == (["failed"], 3), render(verdict)
