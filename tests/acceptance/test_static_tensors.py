"""A graph network on all of its nodes: the adjacency, handed to the step beside them, is split by rows as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

NETWORK = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
draws = np.random.default_rng(0)
N = 16
linked = draws.random((N, N)) < 0.3
linked = (linked | linked.T | np.eye(N, dtype=bool)).astype("float32")
adjacency, labels = linked / linked.sum(1, keepdims=True), draws.integers(0, 3, N)
features = draws.normal(size=(N, 4)).astype("float32")
with strategy.scope():
    weights = tf.Variable(draws.normal(size=(4, 3)).astype("float32"), name="weights")
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build([weights])
whole, labels = tf.constant(adjacency), tf.constant(labels)
def step(nodes, mine):
    with tf.GradientTape() as tape:
        width = tf.shape(mine)[0] if SPLIT else N
        logits = (mine if SPLIT else whole)[:, :width] @ tf.constant(features)[:width] @ weights
        logits = tf.gather(logits, nodes % tf.shape(logits)[0])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, nodes), logits)
        loss = tf.reduce_sum(losses) / N
    optimizer.apply([tape.gradient(loss, weights)], [weights])
    return loss
@tf.function
def train(nodes, mine):
    return strategy.reduce("SUM", strategy.run(step, args=(nodes, mine)), axis=None)
nodes = tf.data.Dataset.range(N).map(lambda i: tf.cast(i, tf.int32)).shuffle(N, seed=1).batch(N).repeat(6)
for nodes, mine in strategy.experimental_distribute_dataset(nodes.map(lambda i: (i, adjacency))):
    train(nodes, mine)
"""


@pytest.mark.parametrize(
    ("split", "verdict", "codes"),
    [pytest.param(True, "divergent", ["static-tensor-split"], marks=pytest.mark.slow), (False, "equivalent", [])],
)
def test_an_adjacency_that_is_split_with_the_nodes_is_no_difference_by_design(
    tmp_path: Path, preload: Preload, split: bool, verdict: str, codes: list[str]
) -> None:
    (tmp_path / "train.py").write_text(NETWORK.replace("SPLIT", str(split)))
    found = emulate.verify(tmp_path / "train.py", "1x2", allow=["in-batch-negatives"], preload=preload)
    assert [run.verdict for run in found.runs] == [verdict], render(found)
    assert [cause.code for cause in found.runs[0].causes if not cause.advice] == codes, render(found)
    assert not any(cause.by_design for cause in found.runs[0].causes)
