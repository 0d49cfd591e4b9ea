"""Numbers that each host has learned from its share, and that its step computes with."""

from __future__ import annotations

from pathlib import Path

import emulate
from emulate.cluster import Preload
from emulate.report import render

WEIGHTED = """
import json, os
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
host, hosts = config.get("task", {}).get("index", 0), len(config.get("cluster", {}).get("worker", [""]))
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0.3).astype("float32")
share = y[host::hosts]
weight = float((1 - share).sum() / share.sum())
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
@tf.function
def train(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.weighted_cross_entropy_with_logits(y, model(x, training=True)[:, 0], weight)
            loss = tf.reduce_sum(losses) / 16
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
for batch in data:
    train(batch)
"""


def test_a_number_that_each_host_writes_into_its_step_is_named_with_its_line(tmp_path: Path, preload: Preload) -> None:
    (tmp_path / "train.py").write_text(WEIGHTED)
    verdict = emulate.verify(tmp_path / "train.py", "2x1", preload=preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "host-values", render(verdict)
    assert cause.locations[0].text.startswith("losses = "), render(verdict)
