"""What a run leaves behind: steps, rows, gradients, weights, reports; and nothing that the program does afterwards."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.errors import GpudistError
from emulate.trace import Facts, Trace
from tests.emulate.probe.loops import BATCH, arrays, assigning_loop, custom_loop


def _sum(trace: Trace, index: int, tensor: str) -> Any:
    step = trace.steps(trace.optimizers[0])[index]
    return np.sum([one.gradients[tensor].read() for one in step.values()], axis=0)


def test_the_sum_of_the_replicas_gradients_is_the_gradient_of_one_device(recorded: Any) -> None:
    three, one = recorded(custom_loop, "1x3"), recorded(custom_loop, "1x1", reference=True)
    assert three.optimizers == one.optimizers == ["sgd"]
    names = list(one.steps("sgd")[0][0].gradients)
    assert names == ["sequential/dense/kernel", "sequential/dense/bias", "sequential/dense_1/kernel", "sequential/dense_1/bias"]
    for index in range(4):
        for name in names:
            np.testing.assert_allclose(_sum(three, index, name), _sum(one, index, name), atol=1e-6)


def test_rows_keep_their_identity_on_every_topology(recorded: Any) -> None:
    two, one = recorded(custom_loop), recorded(custom_loop, "1x1", reference=True)
    for ours, theirs in zip(two.steps("sgd"), one.steps("sgd"), strict=True):
        rows = Counter(row for step in ours.values() for row in step.rows)
        assert rows == Counter(theirs[0].rows)
        assert rows.total() == BATCH


def test_replicas_have_the_same_weights_and_only_the_first_keeps_their_elements(recorded: Any) -> None:
    for step in recorded(custom_loop).steps("sgd"):
        first, second = step[0].weights, step[1].weights
        assert {n: v.digest for n, v in first.items()} == {n: v.digest for n, v in second.items()}
        assert all(variable.array is not None for variable in first.values())
        assert all(variable.array is None for variable in second.values())


def test_the_initial_weights_are_those_before_the_first_step(recorded: Any) -> None:
    trace = recorded(custom_loop)
    before = trace.variables("initial")[(0, 0)]["sequential/dense/kernel"].array.read()
    after = trace.steps("sgd")[0][0].weights["sequential/dense/kernel"].array.read()
    np.testing.assert_allclose(before - 0.01 * _sum(trace, 0, "sequential/dense/kernel"), after, atol=1e-6)


def test_what_the_program_reduces_is_reported_once_a_step_and_what_keras_reduces_is_not(recorded: Any) -> None:
    trace = recorded(custom_loop)
    assert [(one.kind, one.name, one.step) for one in trace.reports][:3] == [("loss", "train/reduce", k) for k in range(3)]
    objective = sum(step.objective for step in trace.steps("sgd")[0].values())
    assert abs(trace.reports[0].value - objective) < 1e-6


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_function_reduces_in_several_places_has_several_names(recorded: Any, eager: bool) -> None:
    def reported(strategy: Any, losses: Any) -> Any:
        twice = strategy.reduce("SUM", losses, axis=None), strategy.reduce("MEAN", losses, axis=None)
        return twice, [strategy.reduce("SUM", one, axis=None) for one in (losses, losses)]

    def program() -> None:
        __import__("tensorflow").config.run_functions_eagerly(eager)
        custom_loop(reported=reported)

    counts = Counter(one.name for one in recorded(program).reports)
    steps = counts["reported/reduce"]
    assert steps in (3, 4)  # it is held when its last step is made
    assert counts == {"reported/reduce": steps, "reported/reduce 2": steps, "reported/reduce 3": 2 * steps}


def test_a_number_that_is_taken_of_one_replica_alone_is_reported_as_it_is(recorded: Any) -> None:
    trace = recorded(functools.partial(custom_loop, reported=lambda s, losses: s.experimental_local_results(losses)[0]))
    assert [(one.kind, one.name, one.step) for one in trace.reports][:2] == [
        ("loss", "train/local result", k) for k in range(2)
    ]
    assert abs(trace.reports[0].value - trace.steps("sgd")[0][0].objective) < 1e-6


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(lambda parts: sum(parts), id="sum"),
        pytest.param(lambda parts: parts[0] + parts[1], id="indices", marks=pytest.mark.slow),
        pytest.param(lambda parts: __import__("tensorflow").add_n(parts), id="add_n", marks=pytest.mark.slow),
        pytest.param(
            lambda parts: __import__("tensorflow").reduce_sum(__import__("tensorflow").stack(parts)),
            id="stack",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_number_that_is_made_of_all_replicas_is_not_taken_for_that_of_one(recorded: Any, whole: Any) -> None:
    def reported(strategy: Any, losses: Any) -> Any:
        return whole(strategy.experimental_local_results(losses))

    assert recorded(functools.partial(custom_loop, reported=reported)).reports == []


def test_what_is_reduced_under_a_strategy_of_one_device_is_reported_too(recorded: Any) -> None:
    trace = recorded(lambda: custom_loop(one_device=True), "1x1")
    assert [(one.name, one.step) for one in trace.reports][:2] == [("train/reduce", 0), ("train/reduce", 1)]


def test_nothing_after_the_last_wanted_step_runs(recorded: Any, tmp_path: Path) -> None:
    mark = tmp_path / "after"
    trace = recorded(lambda: custom_loop(after=mark.touch, epochs=1), steps=4)
    assert trace.num_steps == 4
    assert not mark.exists()
    assert [event["reason"] for _, event in trace.of("end")] == ["steps"]


def test_a_program_with_fewer_steps_ends_by_itself(recorded: Any, tmp_path: Path) -> None:
    mark = tmp_path / "after"
    trace = recorded(lambda: custom_loop(after=mark.touch, epochs=1), steps=9)
    assert trace.num_steps == 4
    assert mark.exists()
    assert [event["reason"] for _, event in trace.of("end")] == ["returned"]
    assert not Facts.of(trace).compiled  # a loop with a model of Keras


def test_a_killed_host_leaves_what_it_had(run: Any) -> None:
    def kill() -> None:
        time.sleep(2)  # what a thread writes is on its way
        os.kill(os.getpid(), signal.SIGKILL)

    result = run(lambda: custom_loop(after=kill, epochs=1), steps=9)
    assert result.status == "failed"
    assert result.trace.num_steps >= 3


def test_beyond_the_budget_elements_are_sampled_and_examples_stay_whole(recorded: Any) -> None:
    def wide() -> None:
        import tensorflow as tf

        weights = tf.Variable(tf.ones([100, 100]))
        strategy = tf.distribute.get_strategy()

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x @ weights)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))

        for _ in range(3):
            strategy.run(step, args=(tf.ones([20, 100]),))

    trace = recorded(wide, "1x1", budget=90_000)
    kept = [step[0].gradients["Variable"] for step in trace.steps("tape")]
    assert [array.is_complete for array in kept] == [True, False, False]
    assert all(step[0].inputs[0].is_complete for step in trace.steps("tape"))
    assert kept[1].shape == (100, 100)
    assert kept[1].read().shape == (1000,)


def test_a_function_compiled_by_xla_is_seen_and_said(run: Any) -> None:
    result = run(lambda: custom_loop(jit=True), "1x1")
    assert result.trace.num_steps == 4
    assert result.xla
    assert any("without XLA" in note for note in result.notes)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_function_for_xla_is_said_only_where_it_runs(run: Any, is_called: bool) -> None:
    def program() -> None:
        import tensorflow as tf

        doubled = tf.function(lambda x: 2 * x, jit_compile=True)  # as packages make them when they are imported
        if is_called:
            doubled(tf.ones(2))
        custom_loop()

    result = run(program, "1x2")
    assert result.xla == is_called
    assert any("without XLA" in note for note in result.notes) == is_called


def test_sparse_gradients_keep_their_rows_once_each(recorded: Any) -> None:
    def embedding() -> None:
        import keras
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        with strategy.scope():
            table = keras.layers.Embedding(10, 2)
            table.build()
            update = keras.optimizers.SGD()

        def step(tokens: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table(tokens))
            gradient = tape.gradient(loss, table.trainable_variables)
            assert isinstance(gradient[0], tf.IndexedSlices)
            update.apply_gradients(zip(gradient, table.trainable_variables, strict=True))

        data = tf.data.Dataset.from_tensor_slices(tf.constant([[1, 1], [3, 4]])).batch(2).repeat(2)
        for tokens in strategy.experimental_distribute_dataset(data):
            strategy.run(tf.function(step), args=(tokens,))

    trace = recorded(embedding, steps=2)
    step = trace.steps("sgd")[0]
    first = step[0].gradients["embedding/embeddings"]
    assert first.rows.read().tolist() == [1]
    assert first.read().tolist() == [[2.0, 2.0] if row == 1 else [0.0, 0.0] for row in range(10)]
    assert step[1].gradients["embedding/embeddings"].rows.read().tolist() == [3, 4]


def test_a_fault_of_the_probe_is_said_instead_of_waited_for(run: Any) -> None:
    def with_a_broken_probe() -> None:
        from emulate.recorder import HostTrace

        HostTrace._step = None
        custom_loop()

    with pytest.raises(GpudistError, match=r"The probe failed on host 0 of run 0\.\nTraceback"):
        run(with_a_broken_probe)


def test_records_of_a_large_model_wait_for_memory_and_none_is_lost(recorded: Any) -> None:
    def program() -> None:
        import keras
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        with strategy.scope():
            variable = tf.Variable(tf.zeros([3 << 20]))  # 24 MiB a record: weights and gradients
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def step() -> None:
            optimizer.apply_gradients([(tf.ones([3 << 20]), variable)])

        @tf.function
        def train() -> None:
            for _ in tf.range(6):
                strategy.run(step)

        train()
        strategy.run(step)

    trace = recorded(program, "1x2", steps=None)
    assert [len(replicas) for replicas in trace.steps("sgd")] == [2] * 7


def test_a_float64_loss_of_keras_on_three_replicas_has_the_exact_factor(run: Any) -> None:
    def fit() -> None:
        import keras
        import tensorflow as tf

        from emulate import upstream

        third = tf.constant(1.0, tf.float64) * keras.ops.cast(1.0 / 3, "float64")
        assert abs(float(third) - 1 / 3) > 1e-9, "Keras casts exactly now: the probe need not"
        assert upstream.keras_loss_module().scale_loss_for_distribution.__wrapped__
        keras.config.set_floatx("float64")
        with tf.distribute.MirroredStrategy().scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = arrays()
        model.fit(x.astype("float64"), y, batch_size=BATCH, shuffle=False, verbose=0)

    three, one = run(fit, "1x3"), run(fit, "1x1", reference=True)
    assert three.status == one.status == "ok", three.failure
    for name in one.trace.steps("sgd")[0][0].gradients:
        np.testing.assert_allclose(_sum(three.trace, 0, name), _sum(one.trace, 0, name), rtol=0, atol=1e-14)
    assert any("rounds the factor 1/3" in note for note in three.notes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in the step"),
        pytest.param({"eager": True}, id="eager", marks=pytest.mark.slow),
        pytest.param({"apart": True}, id="in a run of its own", marks=pytest.mark.slow),
    ],
)
def test_what_a_step_assigns_itself_is_kept_and_what_is_each_replicas_own_is_not(recorded: Any, options: Any) -> None:
    trace = recorded(functools.partial(assigning_loop, **options))
    steps = trace.steps("sgd")[:-1]  # the last is held before its end
    initial = trace.variables("initial")[(0, 0)]
    own = {"average", "count", "teacher/kernel", "teacher/bias", "last"}
    assert Facts.of(trace).of_first == ["last"]
    assert Facts.of(trace).reads == dict.fromkeys(own, "eager" in options)
    assert [set(one.state) for step in steps for one in step.values()] == [own] * 2 * len(steps)
    average = np.zeros((6, 3), "float32")
    for k, step in enumerate(steps):
        average += 0.5 * (step[0].weights["weights"].array.read() - average)
        np.testing.assert_allclose(step[0].state["average"].array.read(), average, atol=1e-7)
        assert step[0].state["count"].array.read() == 2 * (k + 1)
        first, second = ({name: value.digest for name, value in step[r].state.items() if name != "last"} for r in (0, 1))
        assert first == second
    assert not initial["average"].array.read().any()


def test_an_assigned_variable_is_read_where_a_loss_or_another_variable_is_made_of_it(recorded: Any) -> None:
    def program() -> None:
        import keras
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        read = ["of the loss", "of the update", "of another step", "of a condition", "of a tape"]
        names = [*read, "for a report", "of itself"]
        with strategy.scope():
            weights = tf.Variable(tf.ones([4]), name="weights")
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weights])
            once = tf.VariableAggregation.ONLY_FIRST_REPLICA
            own = {name: tf.Variable(1.0, trainable=False, aggregation=once, name=name) for name in names}

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights**2) * own["of the loss"]
            gradient = tape.gradient(loss, weights) / own["of the update"]
            optimizer.apply([gradient], [weights])
            for name, variable in own.items():
                variable.assign(0.5 * variable + 1.0 if name == "of itself" else 1.0)
            if own["of a condition"] > 2.0:
                weights.assign(0.5 * weights)
            return own["for a report"] + loss

        def gradient() -> Any:
            weights.assign((1 - 0.1 * own["of another step"]) * weights)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights**2) * own["of a tape"]
            return tape.gradient(loss, weights)

        def apply(given: Any) -> None:
            optimizer.apply([given], [weights])

        @tf.function
        def train() -> Any:
            return strategy.run(step)

        @tf.function
        def afterwards() -> None:
            strategy.run(apply, args=(strategy.run(gradient),))

        for _ in range(2):
            train()
            afterwards()

    reads = Facts.of(recorded(program, "1x2", steps=None)).reads
    own = {name: is_read for name, is_read in reads.items() if name != "weights"}
    assert [name for name, is_read in own.items() if is_read] == [
        *("of the loss", "of the update", "of another step", "of a condition", "of a tape")
    ]
    assert [name for name, is_read in own.items() if not is_read] == ["for a report", "of itself"]


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_a_large_variable_is_sampled_and_each_of_its_elements_counts(recorded: Any, options: Any) -> None:
    """Of 3 * 2^16 elements every third is kept. One that is not kept becomes another number, or is none, on one replica."""

    def program() -> None:
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        with strategy.scope():
            wide = tf.Variable(tf.zeros((3, 1 << 16)), name="wide")
            optimizer = tf.keras.optimizers.SGD(1.0)
            optimizer.build([wide])

        def step(x: Any) -> None:
            gradient = tf.zeros_like(wide) + tf.reduce_sum(x)
            optimizer.apply_gradients([(gradient, wide)])

        def spoil(value: float) -> None:
            wide.values[1].scatter_nd_update([[0, 1]], [value])

        function = step if options.get("run_eagerly") else tf.function(step, jit_compile=options.get("jit_compile"))
        for value in (None, 7.0, float("nan")):
            if value is not None:
                spoil(value)
            strategy.run(function, (tf.ones((2, 1)),))

    trace = recorded(program, steps=9)
    assert [event["changed"] for _, event in trace.of("left")] == [[], []]
    steps = trace.steps("sgd")
    kept = [step[0].weights["wide"].array for step in steps]
    assert [(array.stride, len(array.read())) for array in kept] == [(3, 1 << 16)] * 3
    same = [step[0].weights["wide"].digest == step[1].weights["wide"].digest for step in steps]
    assert same == [True, False, False]
    finite = [{r: local.weights["wide"].array for r, local in step.items()} for step in steps]
    assert [{r: array.is_finite for r, array in of_step.items() if array} for of_step in finite] == [
        {0: True},
        {0: True, 1: True},
        {0: True, 1: False},
    ]
