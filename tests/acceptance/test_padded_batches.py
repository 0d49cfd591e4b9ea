"""Hosts that pad their own batches have the examples of one device; what the padding changes is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
BATCH = 16
texts = [rng.integers(1, 50, rng.integers(4, 20)).astype("int32") for _ in range(64)]
labels = np.array([text.sum() % 2 for text in texts], "float32")

def of_host(context):
    signature = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.float32))
    dataset = tf.data.Dataset.from_generator(lambda: zip(texts, labels), output_signature=signature)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.padded_batch(context.get_per_replica_batch_size(BATCH), drop_remainder=True)

with strategy.scope():
    embedding, dense = keras.layers.Embedding(50, 8), keras.layers.Dense(1)
    embedding.build(), dense.build((None, 8))
    weights = embedding.trainable_variables + dense.trainable_variables
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

@tf.function
def train(batch):
    def step(tokens, labels):
        mask = tf.cast(tokens != 0, tf.float32)[..., None]
        with tf.GradientTape() as tape:
            values = embedding(tokens)
            logits = dense({mean})[:, 0]
            loss = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)) / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss
    return strategy.reduce("SUM", strategy.run(step, batch), axis=None)

for batch in strategy.distribute_datasets_from_function(of_host):
    print(float(train(batch)))
"""


@pytest.mark.parametrize(
    ("mean", "verdict", "codes"),
    [
        ("tf.reduce_sum(values * mask, 1) / tf.reduce_sum(mask, 1)", "equivalent", []),
        ("tf.reduce_mean(values, 1)", "divergent", ["in-batch-negatives"]),
    ],
    ids=["with a mask", "a mean of the padding too"],
)
def test_hosts_that_pad_their_own_batches(tmp_path: Path, preload: Preload, mean: str, verdict: str, codes: list[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("{mean}", mean))
    judged = emulate.verify(tmp_path / "train.py", "2x1", preload=preload)
    (run,) = judged.runs
    assert (run.verdict, [cause.code for cause in run.causes]) == (verdict, codes), render(judged)
    assert run.samples.missing == 0
    assert all("pads" in cause.fix or "padded_batch" in cause.fix for cause in run.causes)
