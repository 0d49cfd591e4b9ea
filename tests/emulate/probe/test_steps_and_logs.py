"""Loops that make their updates outside of `Strategy.run`: the trace tells what each step leads to, up to the last."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from emulate.trace import Facts, Trace
from tests.emulate.probe.loops import BATCH, arrays


def outside_loop(*, eager: bool = False, batches: int = 6, inside: bool = False, raw: bool = False) -> None:
    """Gradients are returned by the step, summed, and assigned: after it, in it, or in it by an operation that assigns."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).repeat(2).take(batches)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 3]), name="weights")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)) / BATCH
        gradient = tape.gradient(loss, weights)
        if inside:
            summed = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
            if raw:
                tf.raw_ops.AssignSubVariableOp(resource=weights.handle, value=0.1 * summed)
            else:
                weights.assign_sub(0.1 * summed)
        return gradient

    def train(x: Any, y: Any) -> None:
        gradient = strategy.run(step, args=(x, y))
        if not inside:
            weights.assign_sub(0.1 * strategy.reduce("SUM", gradient, axis=None))

    train = train if eager else tf.function(train)
    for x, y in strategy.experimental_distribute_dataset(data):
        train(x, y)


def _check(trace: Trace, number: int) -> None:
    """Each step's weights are those before it less a tenth of its gradients; on all replicas alike."""
    steps = trace.steps("tape")
    assert len(steps) == number
    expected = np.zeros([6, 3])
    for step in steps:
        expected = expected - 0.1 * np.sum([one.gradients["weights"].read() for one in step.values()], axis=0)
        first, second = step[0].weights["weights"], step[1].weights["weights"]
        assert first.array is not None
        np.testing.assert_allclose(first.array.read(), expected, atol=1e-6)
        assert first.digest == second.digest


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("batches", "steps"), [(6, 4), (6, 1), (4, 4), (3, None)])
def test_weights_are_those_after_the_update_held_or_at_the_end(
    recorded: Any, eager: bool, batches: int, steps: int | None
) -> None:
    trace = recorded(functools.partial(outside_loop, eager=eager, batches=batches), steps=steps)
    _check(trace, steps or batches)
    assert all(step[0].outside == ("weights",) for step in trace.steps("tape"))
    assert [event["changed"] for _, event in trace.of("left")] in ([], [[], []])  # the last update is none of the end's
    assert trace.variables("final")[(0, 0)]["weights"].digest == trace.steps("tape")[-1][0].weights["weights"].digest


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("steps", [3, None])
def test_what_the_step_assigns_itself_is_as_it_was(recorded: Any, raw: bool, steps: int | None) -> None:
    trace = recorded(functools.partial(outside_loop, inside=True, raw=raw, batches=4), steps=steps)
    _check(trace, steps or 4)
    assert any(step[0].outside for step in trace.steps("tape")) == raw  # what no one sees assigned the next step tells


def alternating_loop() -> None:
    """Two steps in turn, each of a variable of its own: one updates it by itself, the other leaves that to the program."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).repeat(2)
    with strategy.scope():
        first, second = tf.Variable(tf.ones([6]), name="first"), tf.Variable(tf.ones([6]), name="second")

    def gradient_of(weights: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.linalg.matvec(x, weights) ** 2) / BATCH
        return tape.gradient(loss, weights)

    def by_itself(x: Any) -> None:
        first.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce("SUM", gradient_of(first, x)))

    @tf.function
    def one(x: Any) -> None:
        strategy.run(by_itself, args=(x,))

    @tf.function
    def other(x: Any) -> None:
        gradient = strategy.run(lambda rows: gradient_of(second, rows), args=(x,))
        second.assign_sub(0.1 * strategy.reduce("SUM", gradient, axis=None))

    for x, _ in strategy.experimental_distribute_dataset(data):
        one(x)
        other(x)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_that_update_by_themselves_and_others_are_held_together(recorded: Any, steps: int) -> None:
    trace = recorded(alternating_loop, steps=steps)
    found = trace.steps("tape")
    assert [list(step[0].gradients) for step in found] == [["first"], ["second"], ["first"], ["second"]][:steps]
    for k in range(0, steps, 2):
        assert "first" in found[k][0].weights
    for k in range(1, steps, 2):  # the last of them is seen by a later step of its own
        assert ("second" in found[k][0].weights) == (k + 2 < steps + 1)


def keras_loop(own: bool) -> None:
    """A `fit` whose epoch has more steps than are recorded, of a model with a `train_step` of its own or of Keras's."""
    import keras

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    import tensorflow as tf

    with tf.distribute.MirroredStrategy().scope():
        layers = [keras.Input((6,)), keras.layers.Dense(1, "sigmoid")]
        model = (Own if own else keras.Sequential)(layers)
        model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    x, y = arrays()
    model.fit(x, (y > 0).astype("float32"), batch_size=12, shuffle=False, verbose=0)


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fit_that_is_held_tells_what_its_epoch_would_log_and_whose_train_step_it_has(recorded: Any, own: bool) -> None:
    two = recorded(functools.partial(keras_loop, own), steps=4)
    one = recorded(functools.partial(keras_loop, own), "1x1", reference=True, steps=4)
    reports = [{report.name: report.value for report in trace.reports} for trace in (two, one)]
    assert {"batch/auc", "batch/loss", "epoch so far/auc", "epoch so far/loss"} == set(reports[0])
    assert abs(reports[0]["epoch so far/auc"] - reports[1]["epoch so far/auc"]) < 1e-6
    assert reports[1]["epoch so far/auc"] == reports[1]["batch/auc"]
    assert [event["own_train_step"] for _, event in two.of("program")][-1] is own
    assert Facts.of(two).compiled


def attending_loop(rate: float) -> None:
    """A `fit` of a model whose attention drops this part."""
    import keras
    import tensorflow as tf

    with tf.distribute.MirroredStrategy().scope():
        inputs = keras.Input((6,))
        rows = keras.layers.Reshape((3, 2))(inputs)
        attention = keras.layers.MultiHeadAttention(1, 2, dropout=rate)(rows, rows)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(attention)))
        model.compile("sgd", "mse")
    model.fit(*arrays(), batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_layer_that_drops_nothing_is_no_dropout(recorded: Any, rate: float) -> None:
    assert bool(Facts.of(recorded(functools.partial(attending_loop, rate), steps=1)).dropout) == (rate > 0)


def reducing_loop(*, eager: bool) -> None:
    """A loss that is reduced by a mean and one that is reduced by a sum."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 3]), name="weights")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)) / BATCH
        optimizer.apply([tape.gradient(loss, weights)], [weights])
        return loss

    def train(x: Any, y: Any) -> Any:
        losses = strategy.run(step, args=(x, y))
        mean = strategy.reduce("mean", losses, axis=None)
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return mean, total

    train = train if eager else tf.function(train)
    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        train(x, y)


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_reduced_tells_its_line_and_whether_by_a_mean(recorded: Any, eager: bool) -> None:
    reports = recorded(functools.partial(reducing_loop, eager=eager)).reports
    lines, start = inspect.getsourcelines(reducing_loop)
    first = start + next(number for number, line in enumerate(lines) if "strategy.reduce(" in line)
    assert [(one.name, one.how, one.line) for one in reports[:2]] == [
        ("train/reduce", "mean", f"test_steps_and_logs.py:{first}"),
        ("train/reduce 2", None, f"test_steps_and_logs.py:{first + 1}"),
    ]


def shared_reduction() -> None:
    """Two steps of which one function makes what the program calls."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 3]), name="weights")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)) / BATCH
        optimizer.apply([tape.gradient(loss, weights)], [weights])
        return loss

    def size(x: Any, y: Any) -> Any:
        del y
        return tf.reduce_sum(x**2) / BATCH

    def distributed(call: Any) -> Any:
        def run(*batch: Any) -> Any:
            return strategy.reduce("sum", strategy.run(call, args=batch), axis=None)

        return tf.function(run)

    train, measure = map(distributed, (step, size))
    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        train(x, y)
        measure(x, y)


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_what_one_line_reduces_for_several_steps_has_one_name_on_any_number_of_replicas(recorded: Any, topology: str) -> None:
    reports = recorded(shared_reduction, topology, reference=topology == "1x1").reports
    lines, start = inspect.getsourcelines(shared_reduction)
    line = start + next(number for number, line in enumerate(lines) if "strategy.reduce(" in line)
    assert {(one.name, one.line) for one in reports} == {("run/reduce", f"test_steps_and_logs.py:{line}")}
