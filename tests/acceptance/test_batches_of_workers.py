"""A program that makes its batch as many times larger as TF_CONFIG has workers, as TensorFlow's tutorial does."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

GROWS = """
import json, os
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
workers = len(json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {}).get("worker", [""]))
BATCH = 16 * workers
x = np.random.default_rng(0).normal(size=(192, 6)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    rate = keras.optimizers.schedules.CosineDecay(0.01 * workers, len(x) // BATCH)
    optimizer = keras.optimizers.Adam(rate)
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(BATCH))
@tf.function
def step(batch):
    def one(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)) / {divisor}
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(one, args=batch), axis=None)
for batch in data:
    step(batch)
"""


@pytest.mark.slow  # emulate/verify/test_update_scaling.py has the evidence, on made traces
@pytest.mark.parametrize(
    ("divisor", "verdict", "codes"),
    [("BATCH", "equivalent", []), ("16", "divergent", ["loss-scaling"])],
)
def test_a_rate_and_its_schedule_may_follow_the_number_of_workers_too(
    tmp_path: Path, preload: Preload, divisor: str, verdict: str, codes: list[str]
) -> None:
    (tmp_path / "train.py").write_text(GROWS.replace("{divisor}", divisor))
    judged = emulate.verify(tmp_path / "train.py", "2x1", preload=preload)
    run = judged.runs[0]
    assert (run.verdict, [cause.code for cause in run.causes if not cause.advice]) == (verdict, codes), render(judged)
    assert "the learning rate of its second step is 0.0" in run.causes[-1].evidence
