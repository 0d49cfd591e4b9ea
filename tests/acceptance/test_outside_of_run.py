"""Programs that change variables, or read what was counted, outside of `Strategy.run`: updates, restored models, metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

UPDATES = """
import numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
with strategy.scope():
    weights, bias = tf.Variable(tf.zeros([6, 3]), name="weights"), tf.Variable(tf.zeros([3]), name="bias")
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights + bias)) / 12
    return tape.gradient(loss, [weights, bias])
@tf.function
def train(x, y):
    for variable, gradient in zip([weights, bias], strategy.run(step, args=(x, y))):
        variable.assign_sub(0.1 * {applied})
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(12)):
    train(x, y)
"""


@pytest.mark.parametrize(
    ("applied", "expected"),
    [('strategy.reduce("SUM", gradient, axis=None)', []), ("strategy.experimental_local_results(gradient)[0]", ["weight"])],
)
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_update_outside_of_the_run_is_compared_from_the_first_step_to_the_last(
    preload: Preload, tmp_path: Path, applied: str, expected: list[str], steps: int
) -> None:
    program = tmp_path / "updates.py"
    program.write_text(UPDATES.format(applied=applied))
    (run,) = emulate.verify(program, "1x2", steps=steps, preload=preload).runs
    assert run.steps == steps
    assert [cause.code for cause in run.causes] == ["missing-all-reduce"] * len(expected)
    first = run.first_divergence
    assert ([] if first is None else [(first.kind, first.step)]) == [(kind, 0) for kind in expected]


MADE_IN_THE_STEP = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
rows = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(12))
with strategy.scope():
    model, optimizer = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]), keras.optimizers.Adam(0.01)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x) - y) ** 2) / 12
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
@tf.function
def evaluate(x, y):
    return strategy.reduce("SUM", strategy.run(lambda x, y: tf.reduce_sum((model(x) - y) ** 2), args=(x, y)), axis=None)
for _ in range(2):
    for x, y in rows:
        train(x, y)
    for x, y in rows:
        evaluate(x, y)
"""


def test_weights_made_inside_the_first_step_are_not_taken_from_a_later_one(preload: Preload, tmp_path: Path) -> None:
    program = tmp_path / "made.py"
    program.write_text(MADE_IN_THE_STEP)
    verdict = emulate.verify(program, "1x2", preload=preload)
    assert (verdict.runs[0].verdict, verdict.runs[0].causes) == ("equivalent", ()), render(verdict)
    assert any("first values were not seen" in note for note in verdict.runs[0].notes)


RESTORED = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(160, 3)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16)
def made():
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        model, optimizer = keras.Sequential([keras.Input((3,)), *layers]), keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
    return model, optimizer
def train(model, optimizer, rows):
    @tf.function
    def train_step(x, y):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 16
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            return loss
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
    for x, y in strategy.experimental_distribute_dataset(rows):
        train_step(x, y)
first, optimizer = made()
train(first, optimizer, rows.take(4))
second, optimizer = made()
second.set_weights(first.get_weights())
{then}
train(second, optimizer, rows.skip(4))
"""


@pytest.mark.slow  # emulate/verify/test_first_values.py compares first values, on made traces
@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("", []),
        ("second.layers[-1].kernel.assign(second.layers[-1].kernel * strategy.num_replicas_in_sync)", ["initial-weights"]),
    ],
)
def test_a_restored_model_starts_as_near_as_rounding_lets_the_first_one_end(
    preload: Preload, tmp_path: Path, then: str, expected: list[str]
) -> None:
    program = tmp_path / "restored.py"
    program.write_text(RESTORED.format(then=then))
    verdict = emulate.verify(program, "1x2", preload=preload)
    assert [cause.code for cause in verdict.runs[0].causes] == expected, render(verdict)


TWO_LOSSES = """
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    given = keras.Input((6,))
    model = keras.Model(given, {name: keras.layers.Dense(1, name=name)(given) for name in "ab"})
    model.compile("adam", {"a": "mse", "b": lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2)})
model.fit(x, {"a": x[:, :1], "b": x[:, 1:2]}, batch_size=12, epochs=2, shuffle=False)
"""


def test_logs_are_not_compared_with_the_sum_of_those_of_the_shares(preload: Preload, tmp_path: Path) -> None:
    program = tmp_path / "losses.py"
    program.write_text(TWO_LOSSES)
    verdict = emulate.verify(program, "1x2", preload=preload)
    assert [cause.code for cause in verdict.runs[0].causes] == ["loss-scaling"], render(verdict)
    assert any(text.startswith("batch/loss") for text in verdict.runs[0].not_compared)


FIT = """
import keras, numpy as np, tensorflow as tf
class Largest(keras.metrics.Metric):
    def __init__(self, **options):
        super().__init__(**options)
        self.found = self.add_weight(name="found", initializer="zeros")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.found.assign(tf.maximum(self.found, tf.reduce_max(tf.abs(y_true - y_pred))))
    def result(self):
        return self.found
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[{metric}])
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
model.fit(x, (x.sum(1, keepdims=True) > 0).astype("float32"), batch_size=12, verbose=0)
"""


@pytest.mark.slow  # test_scorecard.py has the cause
@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        ('keras.metrics.AUC(name="auc")', "equivalent"),
        ('Largest(name="largest")', "divergent"),
    ],
)
def test_a_metric_of_fit_is_judged_by_all_replicas_together_where_the_epoch_does_not_end(
    preload: Preload, tmp_path: Path, metric: str, verdict: str
) -> None:
    program = tmp_path / "fit.py"
    program.write_text(FIT.format(metric=metric))
    (run,) = emulate.verify(program, "1x2", steps=4, preload=preload).runs
    assert run.verdict == verdict
    assert [(cause.code, cause.advice) for cause in run.causes] == [("metric-aggregation", verdict == "equivalent")]
