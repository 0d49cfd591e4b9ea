"""Variables that a program's step assigns by itself, and how they are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

UNNAMED = """
import numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
BATCH = 8 * strategy.num_replicas_in_sync
draws = np.random.default_rng(0)
x = draws.normal(size=(96, 6)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat(2).batch(BATCH)
with strategy.scope():
    weights = [tf.Variable(draws.normal(size=shape).astype("float32")) for shape in ((6, 5), (5, 1))]
    momenta = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in weights]
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.tanh(x @ weights[0]) @ weights[1] - y) ** 2) / BATCH
    gradients = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
    for w, m, g in zip(weights, momenta, gradients):
        m.assign(0.9 * m + g)
        w.assign_sub(0.01 * m)
    return loss
@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for x, y in strategy.experimental_distribute_dataset(rows):
    train(x, y)
"""

OUTSIDE = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
seen = tf.Variable(0.0, trainable=False)  # outside of the scope: all replicas have this one
def step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_sum(losses) * (1 + {used}) / 12
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    seen.assign_add({added})
    return loss
@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(12)):
    train(x, y)
"""

LEGACY_METRIC = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tensorflow as tf
keras = tf.keras
keras.utils.set_random_seed(4)
x = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = keras.layers.Dense(1), keras.layers.LayerNormalization()
        self.loss_tracker = keras.metrics.Mean(name="loss")
    def call(self, x):
        return self.dense(self.norm(x))
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            each = tf.reduce_sum((self(x, training=True) - y) ** 2, 1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=16)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        self.loss_tracker.update_state(each)
        return {"loss": self.loss_tracker.result()}
    @property
    def metrics(self):
        return [self.loss_tracker]
with tf.distribute.MirroredStrategy().scope():
    model = Net()
    model.compile(keras.optimizers.SGD(0.05))
model.fit(tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16), verbose=0)
"""


def test_variables_without_names_are_told_apart_in_every_run(tmp_path: Path, preload: Preload) -> None:
    """A run that starts from another's weights gives them to variables by name."""
    (tmp_path / "train.py").write_text(UNNAMED)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=4, preload=preload)
    assert verdict.runs[0].verdict == "equivalent", render(verdict)


@pytest.mark.parametrize(
    ("added", "used", "codes"),
    [
        pytest.param("tf.cast(tf.shape(x)[0], tf.float32)", "0", [], id="rows"),
        pytest.param("1.0", "0.1 * seen", ["variable-aggregation"], id="steps that weigh the loss"),
    ],
)
def test_a_variable_that_replicas_share_is_what_the_last_of_them_leaves(
    tmp_path: Path, preload: Preload, added: str, used: str, codes: list[str]
) -> None:
    (tmp_path / "train.py").write_text(OUTSIDE.format(added=added, used=used))
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=4, preload=preload)
    assert [cause.code for cause in verdict.runs[0].causes] == codes, render(verdict)


@pytest.mark.slow
def test_what_each_replica_counts_for_a_metric_of_legacy_keras_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEGACY_METRIC)
    verdict = emulate.verify(tmp_path / "train.py", "1x2")
    assert verdict.runs[0].verdict == "equivalent", render(verdict)


IN_TWO_FUNCTIONS = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
draws = np.random.default_rng(0)
x, y = draws.normal(size=(128, 6)).astype("float32"), draws.normal(size=(128, 1)).astype("float32")
late = strategy.num_replicas_in_sync if IS_WRONG else 1
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    weights = model.trainable_variables
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.PiecewiseConstantDecay([2], [1e-3, 1e-3 * late]))
    optimizer.build(weights)
    own = dict(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    sums = [tf.Variable(tf.zeros(w.shape), trainable=False, **own) for w in weights]

def gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 32
    return loss, tape.gradient(loss, weights)

def keep(x, y):
    loss, found = gradients(x, y)
    for total, gradient in zip(sums, found):
        total.assign_add(gradient)
    return loss

def update(x, y):
    loss, found = gradients(x, y)
    optimizer.apply_gradients([(g + tf.convert_to_tensor(total), w) for total, g, w in zip(sums, found, weights)])
    for total in sums:
        total.assign(tf.zeros_like(total))
    return loss

@tf.function
def accumulate(x, y):
    return strategy.reduce("SUM", strategy.run(keep, (x, y)), axis=None)

@tf.function
def apply(x, y):
    return strategy.reduce("SUM", strategy.run(update, (x, y)), axis=None)

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
for number, batch in enumerate(strategy.experimental_distribute_dataset(data)):
    print(float((apply if number % 2 else accumulate)(*batch)))
"""


@pytest.mark.parametrize(("is_wrong", "verdict"), [(False, "equivalent"), (True, "divergent")])
def test_what_one_function_keeps_for_another_is_not_left_out(
    tmp_path: Path, preload: Preload, is_wrong: bool, verdict: str
) -> None:
    """An evaluation of the second function alone would miss it, and rounding would hide a rate that is wrong later."""
    (tmp_path / "train.py").write_text(IN_TWO_FUNCTIONS.replace("IS_WRONG", str(is_wrong)))
    judged = emulate.verify(tmp_path / "train.py", "1x2", steps=4, preload=preload)
    (run,) = judged.runs
    assert run.verdict == verdict, render(judged)
    assert run.first_divergence is None or (run.first_divergence.kind, run.first_divergence.step) == ("weight", 3)


VECTORS = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
batch = 2 * strategy.num_replicas_in_sync
x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x.sum(1))).batch(batch))
with strategy.scope():
    weights = tf.Variable(x[0])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build([weights])
def vector(context):
    return np.array([context.replica_id_in_sync_group, 1, 2, 3], "float32")
own = strategy.experimental_distribute_values_from_function(vector)
def step(x, y, own):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2) / batch * tf.reshape(own, [4])[1]
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return loss
train = tf.function(lambda x, y, own: strategy.reduce("SUM", strategy.run(step, args=(x, y, own)), axis=None))
for rows in data:
    print(float(train(*rows, own)))
"""


def test_a_vector_of_each_replicas_own_is_no_input_with_several_entries_for_each_example(
    preload: Preload, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(VECTORS)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    assert verdict.runs[0].verdict == "equivalent", render(verdict)
