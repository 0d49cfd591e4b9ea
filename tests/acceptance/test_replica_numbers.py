"""What a replica computes otherwise because of its own number is found out, and what it adds once for all is right."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
BATCH = 16
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(128, 6)).astype("f4")
y = np.sin(x.sum(1, keepdims=True)).astype("f4")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
def step(x, y):
    first = tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), tf.float32)
    with tf.GradientTape() as tape:
        errors = (model(x, training=True) - {targets}) ** 2
        loss = {loss}
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)):
    train(*batch)
"""
MEAN = "tf.reduce_sum(errors) / BATCH"


@pytest.mark.slow  # emulate/verify/test_sequential_replay.py has the cause, on made traces
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        pytest.param(f"first * {MEAN}", "y", id="the first replica alone trains"),
        pytest.param(MEAN, "(1 - 0.1 * first) * y", id="the first replica smooths its labels"),
    ],
)
def test_rows_that_another_replica_treats_otherwise_are_found_out(
    tmp_path: Path, preload: Preload, loss: str, targets: str
) -> None:
    run, text = judged(tmp_path, preload, loss, targets)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["depends-on-replicas"]), text
    assert "depends on its id (replica_id_in_sync_group)" in run.causes[0].summary
    assert "only after it gets the number of each replica" in run.causes[0].evidence


@pytest.mark.slow
def test_a_term_that_the_first_replica_adds_for_all_is_equivalent(tmp_path: Path, preload: Preload) -> None:
    term = "tf.add_n([tf.reduce_sum(tf.abs(w) ** 1.5) for w in model.trainable_variables])"
    run, text = judged(tmp_path, preload, f"{MEAN} + 0.01 * first * {term}", "y")
    assert (run.verdict, run.causes) == ("equivalent", ()), text


def judged(folder: Path, preload: Preload, loss: str, targets: str) -> tuple[emulate.Run, str]:
    (folder / "train.py").write_text(PROGRAM.format(loss=loss, targets=targets))
    verdict = emulate.verify(folder / "train.py", "1x2", steps=4, preload=preload)
    return verdict.runs[0], render(verdict)
