"""A program that calls Strategy.run on several devices alone is compared with its own plain steps on one."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload

PROGRAM = """
import contextlib, keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
several = len(tf.config.list_physical_devices("GPU")) > 1
strategy = tf.distribute.MirroredStrategy() if several else None
BATCH = {batch}
rng = np.random.default_rng(0)
x, y = rng.normal(size=(52, 6)).astype("float32"), rng.integers(0, 3, 52)
with strategy.scope() if several else contextlib.nullcontext():
    hidden = [keras.layers.Dense(12, "relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

def replica_step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = {loss}
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

@tf.function
def train_step(batch):
    if several:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)
    return replica_step(*batch)

rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(52, seed=1).batch(BATCH)
for batch in strategy.experimental_distribute_dataset(rows) if several else rows:
    print(float(train_step(batch)))
"""


@pytest.mark.parametrize(
    ("batch", "loss", "code"),
    [
        ("8", "tf.reduce_sum(losses) / BATCH", None),
        pytest.param(
            "8 * (strategy.num_replicas_in_sync if several else 1)",
            "tf.reduce_sum(losses) / BATCH",
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param("8", "tf.reduce_mean(losses)", "loss-scaling", marks=pytest.mark.slow),
    ],
    ids=["right", "a batch that grows", "a mean of each replica"],
)
def test_rows_of_plain_steps_on_one_device_are_seen(
    preload: Preload, tmp_path: Path, batch: str, loss: str, code: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.format(batch=batch, loss=loss))
    verdict = emulate.verify(path, topology="1x2", allow=["identical-dropout"], preload=preload)
    (run,) = verdict.runs
    assert run.samples is not None
    assert (run.verdict, [one.code for one in run.causes if not one.allowed][:1]) == (
        ("equivalent", []) if code is None else ("divergent", [code])
    )
