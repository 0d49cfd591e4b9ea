"""Weights that a function of `Strategy.run` sets by the first examples, before the training."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

BY_DATA = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(1, 3, size=(64, 4)).astype("float32")
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(16))
with strategy.scope():
    shift = tf.Variable(tf.zeros(4), aggregation=tf.VariableAggregation.MEAN)
    scale = tf.Variable(tf.ones(4), aggregation=tf.VariableAggregation.MEAN)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([shift, scale])
@tf.function
def begin(batch):
    def by_data(x):
        squares = {whole}tf.reduce_mean(x**2, axis=0){end}
        scale.assign(1 / tf.sqrt(squares))
    strategy.run(by_data, args=(batch,))
@tf.function
def train(batch):
    def step(x):
        with tf.GradientTape() as tape:
            y = (x + shift) * scale
            loss = tf.reduce_sum(y**2 / 2 - tf.math.log(tf.abs(scale))) / 16
        optimizer.apply_gradients(zip(tape.gradient(loss, [shift, scale]), [shift, scale]))
        return loss
    return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
for number, batch in enumerate(data):
    if number == 0:
        begin(batch)
    train(batch)
"""
AVERAGE = "tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, "


@pytest.mark.parametrize(("whole", "end", "codes"), [("", "", ["initial-weights"]), (AVERAGE, ")", [])])
def test_weights_that_each_replica_sets_by_its_own_examples_are_named_with_their_line(
    tmp_path: Path, preload: Preload, whole: str, end: str, codes: list[str]
) -> None:
    (tmp_path / "train.py").write_text(BY_DATA.format(whole=whole, end=end))
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    causes = verdict.runs[0].causes
    assert [cause.code for cause in causes] == codes, render(verdict)
    assert all(cause.locations[0].text.startswith("scale.assign(") for cause in causes), render(verdict)
