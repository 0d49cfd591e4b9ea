"""The functions that a run keeps of its steps: they give what it has recorded, and what it would have for other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from emulate.cluster import Preload
from emulate.evaluate import counts_the_batch, fixed_batches, refusal
from emulate.program import Program
from emulate.progress import Silent
from emulate.recorder import Follow, ProbePlan, Replay
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings
from tests.emulate.probe.loops import assigning_loop, custom_loop
from tests.few import few

Evaluated = Callable[..., tuple[Trace, Trace | None]]


@pytest.fixture
def evaluated(preload: Preload, tmp_path: Path) -> Evaluated:
    """evaluated(program, **fields of the plan) -> the trace of a run, and the one that its functions give.

    The run's own plan is `of`. Beside it the program runs on another topology, first.
    """

    def make(
        program: Callable[[], Any],
        *,
        of: Mapping[str, Any] = MappingProxyType({}),
        beside: str | None = None,
        budget: int = 1 << 28,
        **fields: Any,
    ) -> Any:
        settings = Settings(program=Program.find(program), steps=6, timeout=120)
        with Runner(settings, tmp_path, Silent(), preload=preload) as runner:
            if beside is not None:
                runner.start(beside, Topology.parse(beside), ProbePlan(tmp_path, budget=budget, leads=True)).result()
            plan = ProbePlan(tmp_path, keeps_functions=True, **of)
            run = runner.start("reference", REFERENCE, plan, reference=True)
            assert run.result().status == "ok", run.result().failure
            made = runner.start_evaluated("evaluated", REFERENCE, ProbePlan(tmp_path, **fields), run).result()
        assert run.result().trace is not None
        return run.result().trace, made.trace if made.is_evaluated else None

    return make


def values(trace: Trace, *kinds: str) -> dict[tuple[Any, ...], Any]:
    """Every array of these kinds in every step."""
    found = {}
    for name in trace.optimizers:
        for index, step in enumerate(trace.steps(name)):
            for kind in kinds:
                for tensor, one in getattr(step[0], kind).items():
                    array = getattr(one, "array", one)
                    found[(name, index, kind, tensor)] = array.read() if array is not None else one.digest
    return found


def apart(one: dict[Any, Any], other: dict[Any, Any]) -> list[Any]:
    """What the other lacks, or has with other bits."""
    return [key for key in one if key not in other or not np.array_equal(one[key], other[key])]


def fit(
    *, layers: Callable[[Any], list[Any]], rate: bool = False, rows: int = 100, legacy: bool = False, jit: bool = False
) -> None:
    import keras as keras_3
    import tensorflow as tf
    import tf_keras

    keras: Any = tf_keras if legacy else keras_3
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 4, 6)).astype("float32"), rng.integers(0, 3, rows)
    with tf.distribute.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4, 6)), *layers(keras), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01)
        if jit:  # what tf_keras does where there is a GPU
            optimizer.jit_compile = True
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=[halved] if rate else [])


def flat(keras: Any) -> list[Any]:
    return [keras.layers.Flatten()]


def two_optimizers(*, swap: bool = False, clip: bool = False) -> None:
    """A step with two optimizers, the second of which uses what the first has made, and weights swapped between steps.

    The step may clip its weights in the end.
    """
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    rng = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices(rng.integers(0, 9, (96, 5))).batch(24).repeat(2)
    with strategy.scope():
        table = tf.Variable(rng.normal(size=(9, 4)).astype("f4"), name="table")
        head = tf.Variable(rng.normal(size=(4, 1)).astype("f4"), name="head")
        first, second = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)
        second.build([head])

    def loss_of(rows: Any) -> Any:
        return tf.reduce_sum((tf.reduce_mean(tf.gather(table, rows), 1) @ head - 1.0) ** 2) / 24

    @tf.function
    def train(rows: Any) -> None:
        def step(rows: Any) -> None:
            for optimizer, variable in ((first, table), (second, head)):
                with tf.GradientTape() as tape:
                    loss = loss_of(rows)
                optimizer.apply([tape.gradient(loss, variable)], [variable])
                if clip:
                    variable.assign(tf.clip_by_value(variable, -0.5, 0.5))

        strategy.run(step, args=(rows,))

    for rows in strategy.experimental_distribute_dataset(data):
        train(rows)
        if swap:
            head.assign(0.5 * head)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "a loop whose optimizer makes its variables in the first step": partial(custom_loop, optimizer="adam"),
    "dropout by example": partial(custom_loop, dropout=True),
    "fit with an uneven last batch and a new learning rate": partial(fit, layers=flat, rate=True),
    "fit of tf_keras": partial(fit, layers=flat, legacy=True),
    "fit of tf_keras that updates by XLA": partial(fit, layers=flat, legacy=True, jit=True),
    "batch normalization": partial(fit, layers=lambda keras: [*flat(keras), keras.layers.BatchNormalization()]),
    "a loop inside the step": partial(fit, layers=lambda keras: [keras.layers.GRU(5)]),
    "variables that the step assigns": assigning_loop,
    "sparse gradients and two optimizers": two_optimizers,
    "weights changed between two steps": partial(two_optimizers, swap=True),
}


FAST = (
    "a loop whose optimizer makes its variables in the first step",
    "dropout by example",
    "fit with an uneven last batch and a new learning rate",
    "sparse gradients and two optimizers",
)


@pytest.mark.parametrize("name", few(PROGRAMS, FAST))
def test_the_functions_of_a_run_give_to_the_bit_what_it_has_recorded(evaluated: Evaluated, name: str) -> None:
    run, found = evaluated(PROGRAMS[name])
    assert refusal(run) is None
    assert found is not None
    kinds = ("gradients", "weights", "state")
    assert values(run, *kinds)
    assert apart(values(run, *kinds), values(found, *kinds)) == []
    for optimizer in run.optimizers:
        recorded = [step[0].objective for step in run.steps(optimizer)]
        # A program of two optimizers may be held in its last step between them; the evaluation makes this step whole.
        assert [step[0].objective for step in found.steps(optimizer)][: len(recorded)] == recorded


def test_permuted_rows_and_units_in_the_last_place_change_gradients_by_rounding_alone(evaluated: Evaluated) -> None:
    run, found = evaluated(partial(custom_loop, optimizer="adam"), permute=True, perturb=1.0, noise_seed=1)
    assert found is not None
    one, other = values(run, "gradients"), values(found, "gradients")
    off = [float(np.max(np.abs(one[key] - other[key])) / np.max(np.abs(one[key]))) for key in one]
    assert 0 < max(off) < 1e-4
    rows = [trace.steps(run.optimizers[0])[0][0].rows or () for trace in (run, found)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) != []


def test_the_numbers_that_a_noise_run_reports_are_rounded_as_its_gradients_are(evaluated: Evaluated) -> None:
    run, found = evaluated(custom_loop, perturb=1.0, noise_seed=1)
    assert found is not None
    losses = [[report.value for report in trace.reports] for trace in (run, found)]
    assert losses[0][0] != losses[1][0]  # the first step has no other rows, and no update before it
    np.testing.assert_allclose(*losses, rtol=1e-5)


def heads_in_turn() -> None:
    """One optimizer for a shared table and two heads, each of which is trained in every other step."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    rng = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices(rng.normal(size=(144, 4)).astype("f4")).batch(24)
    with strategy.scope():
        table = tf.Variable(rng.normal(size=(4, 3)).astype("f4"), name="table")
        heads = [tf.Variable(rng.normal(size=(3, 1)).astype("f4"), name=f"head_{k}") for k in range(2)]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([table, *heads])

    @tf.function
    def train(rows: Any, number: int) -> None:
        def step(rows: Any) -> None:
            variables = [table, heads[number]]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.tanh(rows @ table) @ heads[number] - 1.0) ** 2) / 24
            optimizer.apply(tape.gradient(loss, variables), variables)

        strategy.run(step, args=(rows,))

    for k, rows in enumerate(strategy.experimental_distribute_dataset(data)):
        train(rows, k % 2)


def wide(keras: Any) -> list[Any]:
    return [*flat(keras), keras.layers.Dense(400)]


@pytest.mark.parametrize("budget", [1 << 28, pytest.param(0, marks=pytest.mark.slow)])
def test_with_another_runs_gradients_or_their_sums_the_weights_are_that_runs_and_the_gradients_its_own(
    evaluated: Evaluated, tmp_path: Path, budget: int
) -> None:
    follow = Follow(tmp_path / "1x2")
    run, found = evaluated(partial(fit, layers=wide), beside="1x2", budget=budget, follow=follow, initial=follow.trace)
    assert found is not None
    assert found.follows
    sums = [one.sums for step in Trace(follow.trace).steps(run.optimizers[0]) for one in step.values() if one.sums]
    assert len(sums) == (0 if budget else 6)
    one, other = values(run, "gradients", "weights"), values(found, "gradients", "weights")
    # Adam makes of rounding near its epsilon up to 3.2e-6 on an H200, and less than 1e-6 on CPUs.
    assert all(np.allclose(one[key], other[key], atol=1e-5) for key in one)
    assert apart(one, other)  # the sum over two replicas is rounded in another way


def test_weights_that_a_step_changes_after_its_update_are_those_of_the_other_run_in_the_next_step(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    follow = Follow(tmp_path / "1x2")
    run, found = evaluated(partial(two_optimizers, clip=True), beside="1x2", follow=follow, initial=follow.trace)
    assert found is not None
    one, other = values(run, "gradients"), values(found, "gradients")
    assert all(np.allclose(one[key], other[key], atol=1e-6) for key in one)


def test_a_variable_that_some_steps_train_gets_the_other_runs_gradients_of_these_steps(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    follow = Follow(tmp_path / "1x2")
    run, found = evaluated(heads_in_turn, beside="1x2", follow=follow, initial=follow.trace)
    assert found is not None
    one, other = values(run, "weights"), values(found, "weights")
    assert len(one) == 12
    assert all(np.allclose(one[key], other[key], atol=1e-6) for key in one)


@pytest.mark.parametrize("shares", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_rows_of_another_run_give_its_gradients(evaluated: Evaluated, tmp_path: Path, shares: int) -> None:
    replay = Replay(tmp_path / "1x2", shares)
    _, found = evaluated(partial(fit, layers=flat), beside="1x2", replay=replay, initial=tmp_path / "1x2")
    assert found is not None
    other = Trace(tmp_path / "1x2")
    (name,) = other.optimizers
    first, made = other.steps(name)[0], found.steps(name)[0][0]
    for tensor, gradient in made.gradients.items():
        parts = [first[replica].gradients[tensor].read() for replica in first]
        assert np.allclose(gradient.read(), sum(parts), atol=1e-6)


def compares_examples() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(tf.ones([3, 2]))
        optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def train(rows: Any) -> Any:
        def step(rows: Any) -> Any:
            with tf.GradientTape() as tape:
                made = rows @ weight
                loss = tf.reduce_mean(tf.nn.log_softmax(made @ tf.transpose(made)))
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
            return loss

        return strategy.reduce("MEAN", strategy.run(step, args=(rows,)), axis=None)

    rows = tf.data.Dataset.from_tensor_slices(np.random.default_rng(0).normal(size=(48, 3)).astype("f4"))
    for batch in strategy.experimental_distribute_dataset(rows.batch(8, drop_remainder=True)):
        train(batch)


def test_functions_for_batches_of_one_size_are_made_for_one_share_and_evaluated_for_all(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    shares = Replay(tmp_path / "1x2", 2, summed=True)
    beside = {"beside": "1x2", "initial": tmp_path / "1x2"}
    whole, nothing = evaluated(compares_examples, replay=shares, **beside)
    assert fixed_batches(whole) == {8}
    assert nothing is None
    part, found = evaluated(compares_examples, of={"replay": shares.of_a_share}, replay=shares, **beside)
    assert found is not None
    (name,) = found.optimizers
    assert [len(step[0].rows or ()) for step in part.steps(name)] == 6 * [4]
    assert [len(step[0].rows or ()) for step in found.steps(name)] == 6 * [8]
    first = Trace(tmp_path / "1x2").steps(name)[0]
    parts = [one.gradients["Variable"].read() for one in first.values()]
    assert np.allclose(found.steps(name)[0][0].gradients["Variable"].read(), sum(parts), atol=1e-6)
    assert not np.allclose(whole.steps(name)[0][0].gradients["Variable"].read(), sum(parts), atol=1e-3)


def sums_itself() -> None:
    """A batch that grows with the replicas; its examples are counted outside of the step, its gradients summed inside."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(tf.ones([3]))
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    @tf.function
    def train(rows: Any) -> None:
        number = tf.add_n([tf.math.count_nonzero(one[:, 0]) for one in strategy.experimental_local_results(rows)])

        def step(rows: Any, number: Any) -> None:
            (gradient,) = tf.gradients(tf.reduce_sum((rows @ weight[:, None]) ** 2) / tf.cast(number, tf.float32), [weight])
            context = tf.distribute.get_replica_context()
            (gradient,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [gradient])
            gradient = tf.clip_by_value(gradient, -1.0, 1.0) / strategy.num_replicas_in_sync
            optimizer.apply_gradients([(gradient, weight)])

        strategy.run(step, args=(rows, number))

    rows = tf.data.Dataset.from_tensor_slices(np.random.default_rng(0).normal(size=(96, 3)).astype("f4"))
    size = 8 * strategy.num_replicas_in_sync
    for batch in strategy.experimental_distribute_dataset(rows.batch(size, drop_remainder=True)):
        train(batch)


def test_shares_are_summed_where_a_step_sums_itself_and_counted_together_where_it_counts_outside(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    run, found = evaluated(sums_itself, beside="1x2", replay=Replay(tmp_path / "1x2", 2), initial=tmp_path / "1x2")
    assert counts_the_batch(run)
    assert found is not None
    (name,) = found.optimizers
    for step, replicas in zip(found.steps(name), Trace(tmp_path / "1x2").steps(name), strict=True):
        for one in replicas.values():  # it divides the clipped sum by the number of replicas
            assert np.allclose(step[0].gradients["Variable"].read(), 2 * one.gradients["Variable"].read(), atol=1e-6)


def normalized(rows: Any, weights: list[Any], total: Callable[[Any], Any], part: slice = slice(None)) -> Any:
    """The loss of a part of the rows after as many layers as weights, each of which takes the mean over all rows off."""
    import tensorflow as tf

    for weight in weights:
        rows = tf.tanh(rows @ weight)
        rows -= total(tf.reduce_sum(rows, 0)) / total(tf.cast(tf.shape(rows)[0], tf.float32))
    return tf.reduce_mean(rows[part] ** 3)


def synchronizes(layers: int) -> None:
    """A last batch of five rows, layers that normalize over all of them, and a mean over the means of the replicas."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weights = [tf.Variable(initial, name=f"w{k}") for k, initial in enumerate(initial_weights(layers))]
        moving = tf.Variable(tf.zeros([3]), trainable=False, aggregation=tf.VariableAggregation.MEAN)
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(weights)

    def total(value: Any) -> Any:
        value = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)
        moving.assign_add(tf.broadcast_to(value, [3]))
        return value

    @tf.function
    def train(rows: Any) -> None:
        def step(rows: Any) -> None:
            with tf.GradientTape() as tape:
                loss = normalized(rows, weights, total) / strategy.num_replicas_in_sync
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        strategy.run(step, args=(rows,))

    rows = tf.data.Dataset.from_tensor_slices(ROWS_TO_NORMALIZE)
    for batch in strategy.experimental_distribute_dataset(rows.batch(8)):
        train(batch)


ROWS_TO_NORMALIZE = np.random.default_rng(0).normal(size=(13, 3)).astype("f4")


def initial_weights(layers: int) -> list[Any]:
    return list(np.random.default_rng(1).normal(size=(layers, 3, 3)).astype("f4"))


@pytest.mark.parametrize("layers", [2, 12])  # deep networks add up more than a hundred times
def test_the_gradients_of_each_replicas_loss_pass_through_all_replicas(
    evaluated: Evaluated, tmp_path: Path, layers: int
) -> None:
    import tensorflow as tf

    replay = Replay(tmp_path / "1x2", 2, summed=True, told=2, by_loss=True)
    program = partial(synchronizes, layers)
    _, found = evaluated(
        program,
        of={"replay": replay.of_all_rows},
        beside="1x2",
        replay=replay,
        initial=tmp_path / "1x2",
        follow=Follow(tmp_path / "1x2"),
    )
    assert found is not None
    other = Trace(tmp_path / "1x2")
    (name,) = other.optimizers
    weights = [tf.constant(weight) for weight in initial_weights(layers)]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(weights)
        rows = tf.constant(ROWS_TO_NORMALIZE[:8])
        losses = [normalized(rows, weights, tf.identity, part) / 2 for part in (slice(0, 4), slice(4, 8))]
    for replica, loss in enumerate(losses):
        for k, expected in enumerate(tape.gradient(loss, weights)):
            assert np.allclose(found.steps(name)[0][replica].gradients[f"w{k}"].read(), expected, atol=2e-6)
    for ours, theirs in zip(found.steps(name), other.steps(name), strict=True):
        assert [len(one.rows or ()) for one in ours.values()] == [len(one.rows or ()) for one in theirs.values()]
        for tensor in theirs[0].gradients:
            sums = [sum(one.gradients[tensor].read() for one in step.values()) for step in (ours, theirs)]
            assert np.allclose(*sums, atol=2e-6)
        assert ours[0].state
        for ours_after, theirs_after in zip(ours[0].state.values(), theirs[0].state.values(), strict=True):
            assert np.allclose(ours_after.array.read(), theirs_after.array.read(), atol=1e-5)


def eager() -> None:
    assigning_loop(eager=True)


def ragged() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(1.0)

    @tf.function
    def train(rows: Any) -> None:
        def step(rows: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.reduce_sum(rows, 1) * weight) ** 2) / 4
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        strategy.run(step, args=(rows,))

    for _ in range(3):
        train(tf.ragged.constant([[1.0, 2.0], [3.0]]))


def _descent(strategy: Any, weight: Any, features: Callable[[Any], Any]) -> Any:
    """Return a step whose loss is the sum of all features of the rows times the weight."""
    import tensorflow as tf

    @tf.function
    def train(rows: Any) -> None:
        def step(rows: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(features(rows) * weight)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        strategy.run(step, args=(rows,))

    return train


def in_python() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable([1.0])

    train = _descent(strategy, weight, lambda rows: tf.numpy_function(lambda x: x, [rows], tf.float32))
    for _ in range(3):
        train(tf.ones([4, 1]))


def with_text() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable([1.0])
    scales = tf.constant(200 * ["2.0"])  # of up to 128 elements TensorFlow copies into the graph
    train = _descent(strategy, weight, lambda rows: rows * tf.strings.to_number(scales[0]))
    for _ in range(3):
        train(tf.ones([4, 1]))


def elsewhere() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable([1.0])

    train = _descent(strategy, weight, lambda rows: rows)

    @tf.function
    def shrink() -> None:
        weight.assign(0.9 * weight)

    for _ in range(3):
        train(tf.ones([4, 1]))
        shrink()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (eager, "eager code"),
        pytest.param(ragged, "sparse or ragged", marks=pytest.mark.slow),
        (in_python, "PyFunc"),
        pytest.param(with_text, "a constant of type string", marks=pytest.mark.slow),
        (elsewhere, "another function of the program assigns"),
    ],
)
def test_a_step_that_is_no_function_of_its_rows_and_variables_is_refused_and_the_program_runs_again(
    evaluated: Evaluated, program: Callable[[], Any], why: str
) -> None:
    run, found = evaluated(program)
    assert why in str(refusal(run))
    assert found is None
