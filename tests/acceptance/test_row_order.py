"""Programs to which a row's place in its batch matters, or whose step gets what the model has computed before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
ROWS, BATCH = 192, 24
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6)).astype("float32")
y = np.eye(3, dtype="float32")[np.argmax(x[:, :3], 1)]
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(12, activation="relu"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.003)
    optimizer.build(model.trainable_variables)
    last = tf.Variable(tf.zeros([BATCH // strategy.num_replicas_in_sync, 3]), trainable=False,
                       synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.NONE)

def step(x, y, weight):
    {before}
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        losses = tf.nn.softmax_cross_entropy_with_logits(y, logits)
        loss = {loss}
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    last.assign(logits)
    return loss

@tf.function
def train(x, y, weight):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y, weight)), axis=None)

for first in range(0, ROWS, BATCH):
    rows = slice(first, first + BATCH)
    weights = 1 / (1 + np.exp(-np.asarray(model(x[rows]))[:, :1])) if {computed} else np.ones((BATCH, 1), "float32")
    batch = tf.data.Dataset.from_tensors((x[rows], y[rows], weights)).unbatch().batch(BATCH)
    for inputs in strategy.experimental_distribute_dataset(batch):
        train(*inputs)
"""
MIXED = "x, y = (0.7 * one + 0.3 * tf.roll(one, 1, axis=0) for one in (x, y))"
KEPT = "loss = tf.reduce_sum(losses + tf.reduce_sum(0.1 * tf.stop_gradient(last) * logits, 1)) / BATCH"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(before: str = "", loss: str = "tf.reduce_sum(losses) / BATCH", *, computed: bool = False) -> Path:
        path = tmp_path / "train.py"
        path.write_text(PROGRAM.format(before=before or "pass", loss=loss, computed=computed))
        return path

    return make


@pytest.mark.slow
def test_a_wrong_loss_does_not_hide_in_rows_that_are_mixed_by_place(write: Callable[..., Path], preload: Preload) -> None:
    verdict = emulate.verify(write(MIXED, "tf.reduce_mean(losses)"), "1x4", preload=preload)
    assert verdict.runs[0].verdict == "divergent", render(verdict)
    assert any("depends on the order of the examples" in note for note in verdict.notes), render(verdict)


@pytest.mark.slow
def test_what_is_kept_by_place_for_the_next_batch_is_equivalent_where_it_is_right(
    write: Callable[..., Path], preload: Preload
) -> None:
    verdict = emulate.verify(write(loss=KEPT.removeprefix("loss = ")), "1x4", preload=preload)
    assert verdict.is_equivalent, render(verdict)
    assert any("depends on the order of the examples" in note for note in verdict.notes), render(verdict)


def test_inputs_of_a_step_that_the_model_computes_are_no_other_rows(write: Callable[..., Path], preload: Preload) -> None:
    program = write(loss="tf.reduce_sum(tf.squeeze(weight, 1) * losses) / BATCH", computed=True)
    verdict = emulate.verify(program, "1x4", preload=preload)
    assert verdict.is_equivalent, render(verdict)
    assert any(
        "identifies examples only by inputs 1, 2" in note or "identifies examples only by input 1" in note
        for note in verdict.runs[0].notes
    )
