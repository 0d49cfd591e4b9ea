"""What a script of findings/ shows, in a program of a user: the verdict, the cause, the line and the fix are right."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify.verdict import Run

HEAD = """
import keras, numpy as np, tensorflow as tf
import gpudist_core as gd
strategy = tf.distribute.MirroredStrategy()
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 4)).astype("float32")
y = x[:, :1] * 2
"""
FIT = """
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
"""
DISTILLER = """
y = draw.integers(0, 3, size=(64,))
def network(units):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)])
with strategy.scope():
    model = keras.distillation.Distiller(network(16), network(4), keras.distillation.LogitsDistillation())
    model.compile(keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
RANGES = """
class Clip(keras.layers.Layer):
    def build(self, shape):
        self.low, self.high = (self.add_weight(shape=(), initializer="zeros", trainable=False, name=n) for n in ("low", "high"))
    def call(self, x, training=False):
        if training:
            self.low.assign(keras.ops.minimum(self.low, keras.ops.min(x)))
            self.high.assign(keras.ops.maximum(self.high, keras.ops.max(x)))
        return tf.quantization.fake_quant_with_min_max_vars(x, self.low.value, self.high.value)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Clip(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
CODEBOOK = """
class Codes(keras.layers.Layer):
    def build(self, shape):
        read, first = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.ONLY_FIRST_REPLICA
        start = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
        self.book = tf.Variable(start, trainable=False, synchronization=read, aggregation=first, name="book")
    def call(self, x):
        near = tf.argmin(tf.reduce_sum((x[:, None] - self.book) ** 2, -1), 1)
        hot = tf.one_hot(near, 8)
        counts = tf.reduce_sum(hot, 0)[:, None]
        means = tf.matmul(hot, x, transpose_a=True) / tf.maximum(counts, 1)
        self.book.assign(tf.where(counts > 0, 0.9 * self.book + 0.1 * means, self.book))
        return x + tf.stop_gradient(tf.gather(self.book, near) - x)
def network(x):
    return outer(codes(inner(x)))
with strategy.scope():
    inner, codes, outer = keras.layers.Dense(4), Codes(), keras.layers.Dense(1)
    network(x[:2])
    variables = inner.trainable_variables + outer.trainable_variables
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((network(x) - y) ** 2) / 16
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss
@tf.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(16)):
    print(float(train(batch)))
"""
WRONG = {
    # Findings: keras_distiller_on_replicas, keras_distillation_without_softmax.
    "a term of the loss that Keras does not divide": (DISTILLER + FIT, "loss-scaling", "model.fit("),
    # Finding: tfmot_input_ranges_of_each_replica.
    "ranges of each replica's own inputs": (RANGES + FIT, "variable-aggregation", "self.high.assign("),
    # Finding: sonnet_codebooks_of_each_replica.
    "a codebook of each replica's own codes": (CODEBOOK, "variable-aggregation", "counts = "),
}


def _verified(path: Path, program: str, preload: Preload, topology: str = "1x2") -> tuple[emulate.Verdict, Run]:
    path.write_text(HEAD + program, encoding="utf-8")
    verdict = emulate.verify(path, topology, preload=preload)
    return verdict, verdict.runs[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_surprise_that_makes_another_model_has_its_one_cause_and_its_line(
    tmp_path: Path, preload: Preload, name: str
) -> None:
    program, code, line = WRONG[name]
    verdict, run = _verified(tmp_path / "train.py", program, preload)
    assert [cause.code for cause in run.causes] == [code], render(verdict)
    assert run.causes[0].locations[0].text.startswith(line), render(verdict)
