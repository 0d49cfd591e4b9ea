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
tags = [text % 5 for text in texts]

def of_host(context):
    signature = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int32))
    dataset = tf.data.Dataset.from_generator(lambda: zip(texts, tags), output_signature=signature)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    size = context.get_per_replica_batch_size(BATCH)
    return dataset.padded_batch(size, padding_values=(0, PADDING), drop_remainder=True)

with strategy.scope():
    embedding, dense = keras.layers.Embedding(50, 8), keras.layers.Dense(5)
    embedding.build(), dense.build((None, None, 8))
    weights = embedding.trainable_variables + dense.trainable_variables
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

@tf.function
def train(batch):
    def step(texts, tags):
        mask = tf.cast(texts > 0, tf.float32)
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(tags, 0), dense(embedding(texts))) * mask
            loss = tf.reduce_sum(MEAN) / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss
    return strategy.reduce("SUM", strategy.run(step, batch), axis=None)

for batch in strategy.distribute_datasets_from_function(of_host):
    print(float(train(batch)))
"""
OF_TOKENS = "tf.reduce_sum(each, 1) / tf.reduce_sum(mask, 1)"
OF_PADDING_TOO = "tf.reduce_mean(each, 1)"


@pytest.mark.parametrize(
    ("padding", "mean", "verdict", "codes"),
    [
        pytest.param("0", OF_TOKENS, "equivalent", [], id="zeros"),
        pytest.param("-1", OF_TOKENS, "equivalent", [], id="tags of which none is a class"),
        pytest.param("-1", OF_PADDING_TOO, "divergent", ["in-batch-negatives"], id="a mean of the padding too"),
    ],
)
def test_hosts_that_pad_their_own_batches(
    tmp_path: Path, preload: Preload, padding: str, mean: str, verdict: str, codes: list[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("PADDING", padding).replace("MEAN", mean))
    judged = emulate.verify(tmp_path / "train.py", "2x1", preload=preload)
    (run,) = judged.runs
    assert (run.verdict, [cause.code for cause in run.causes]) == (verdict, codes), render(judged)
    assert run.samples.missing == 0
    assert all("pads" in cause.fix or "padded_batch" in cause.fix for cause in run.causes)
