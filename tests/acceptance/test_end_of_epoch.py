"""A default run covers the end of the first epoch where it can; where it does not, the headline says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

FIT = """
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(211, 4)).astype("float32")
y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
"""
LOOP = """
import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
rows = np.random.default_rng(0).normal(size=(211, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices(rows).batch(8)
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]), name="weights")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weights])

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x @ weights - 1.0) ** 2) / 8
    optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights]))
    return loss

{decorator}
def train_step(x):
    return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

for _ in range(3):
    for x in strategy.experimental_distribute_dataset(data):
        train_step(x)
"""


def test_an_uneven_last_batch_is_found_without_any_option(preload: Preload, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIT)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    (run,) = verdict.runs
    assert (run.verdict, run.causes[0].code) == ("divergent", "uneven-batch"), render(verdict)
    assert run.first_divergence is not None
    assert run.first_divergence.step == 26
    assert verdict.to_json()["runs"][0]["steps_run"] == {
        "first": 0,
        "last": 26,
        "stopped": True,
        "epoch_batches": 27,
        "last_batch_examples": 3,
        "epoch_complete": True,
    }


def test_a_number_of_steps_is_kept_and_the_headline_says_what_was_not_run(preload: Preload, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIT)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=20, preload=preload)
    headline = "equivalent in the first 20 steps; the last batch of an epoch (3 examples on 2 replicas) was not run"
    assert f"1x2  {headline}\n" in render(verdict)
    assert [run.steps for run in verdict.runs] == [20]


@pytest.mark.slow  # test_an_uneven_last_batch_is_found_without_any_option has the end of an epoch
@pytest.mark.parametrize(("decorator", "topology"), [("@tf.function", "1x2"), ("", "1x3")])
def test_a_right_loop_is_run_to_the_end_of_its_first_epoch(
    preload: Preload, tmp_path: Path, decorator: str, topology: str
) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(decorator=decorator))
    verdict = emulate.verify(tmp_path / "train.py", topology, preload=preload)
    assert [(run.verdict, run.steps) for run in verdict.runs] == [("equivalent", 27)], render(verdict)
    assert f"{topology}  equivalent in the first 27 steps\n" in render(verdict)
    assert verdict.reference.steps == 27
