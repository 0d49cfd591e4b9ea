"""Runs that are to give the same mathematics: permuted, rounded differently, on another run's rows, with the same draws."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from emulate import Cluster
from emulate.cluster import Preload
from emulate.recorder import Replay
from emulate.trace import Facts, Trace
from tests.emulate.probe.loops import BATCH, arrays, corrupting_loop, custom_loop, nested_loop


def _gradients(trace: Trace, index: int) -> dict[str, Any]:
    step = trace.steps(trace.optimizers[0])[index]
    return {name: np.sum([one.gradients[name].read() for one in step.values()], axis=0) for name in step[0].gradients}


def _same(one: Trace, other: Trace, *, atol: float = 1e-6) -> None:
    for index in range(4):
        for name, gradient in _gradients(one, index).items():
            np.testing.assert_allclose(gradient, _gradients(other, index)[name], atol=atol)


def test_a_permuted_run_has_the_same_rows_in_another_order_and_the_same_gradients(recorded: Any) -> None:
    plain = recorded(custom_loop, "1x1", reference=True)
    permuted = [recorded(custom_loop, "1x1", reference=True, permute=True, perturb=1.0, noise_seed=k) for k in (1, 2)]
    for step in range(4):
        orders = [trace.steps("sgd")[step][0].rows for trace in (plain, *permuted)]
        assert Counter(orders[0]) == Counter(orders[1]) == Counter(orders[2])
        assert len(set(orders)) == 3
    _same(plain, permuted[0])
    assert any((_gradients(plain, 3)[name] != _gradients(permuted[0], 3)[name]).any() for name in _gradients(plain, 3))


def test_the_union_of_another_runs_rows_gives_its_gradient(recorded: Any) -> None:
    two = recorded(custom_loop)
    replayed = recorded(custom_loop, "1x1", reference=True, replay=Replay(two.directory))
    for ours, theirs in zip(replayed.steps("sgd"), two.steps("sgd"), strict=True):
        assert list(ours[0].rows) == [row for replica in sorted(theirs) for row in theirs[replica].rows]
    _same(two, replayed)


def test_shares_one_after_the_other_are_applied_once_as_their_mean(recorded: Any) -> None:
    two = recorded(custom_loop)
    replayed = recorded(custom_loop, "1x1", reference=True, replay=Replay(two.directory, shares=2))
    assert replayed.num_steps == 4
    first = _gradients(two, 0)
    for name, gradient in _gradients(replayed, 0).items():
        np.testing.assert_allclose(2 * gradient, first[name], atol=1e-6)


def test_shares_that_are_regrouped_have_the_same_rows_and_each_of_all_replicas(recorded: Any) -> None:
    two = recorded(custom_loop)
    options: dict[str, Any] = {"shares": 2, "summed": True}
    apart, dealt = (
        recorded(custom_loop, "1x1", reference=True, replay=Replay(two.directory, regrouped=regrouped, **options))
        for regrouped in (False, True)
    )
    last = [trace.steps("sgd")[0][0].rows for trace in (apart, dealt)]
    first, second = (two.steps("sgd")[0][replica].rows for replica in (0, 1))
    assert last == [second, (*first[1::2], *second[1::2])]
    _same(two, dealt)
    _same(apart, dealt)


def _dropout_loop() -> None:
    custom_loop(dropout=True)


def test_draws_belong_to_the_row_whatever_its_position_and_replica(recorded: Any) -> None:
    one = recorded(_dropout_loop, "1x1", reference=True)
    permuted = recorded(_dropout_loop, "1x1", reference=True, permute=True, noise_seed=3)
    three = recorded(_dropout_loop, "1x3")
    _same(one, permuted)
    _same(one, three)


def _drawing_rows() -> None:
    """Of every distribution for the rows, for the batch, and of pairs of rows that are near each other by what they are."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    x, _ = arrays()
    data = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        update = keras.optimizers.SGD(0.1)
        generator = tf.random.Generator.from_seed(3)

    def step(x: Any) -> Any:
        rows = tf.shape(x)[0]
        of_row = [
            tf.random.gamma([rows], tf.constant([0.5, 2.0])),
            tf.random.gamma([], tf.fill([rows, 1], 3.0)),
            tf.random.stateless_gamma([rows, 2], seed=(1, 2), alpha=[0.7, 1.5]),
            tf.random.poisson([rows, 2], 3.0),
            tf.random.stateless_poisson([rows, 1], seed=(1, 2), lam=50.0, dtype=tf.float32),
            tf.cast(generator.binomial([rows, 2], 10.0, [0.3, 0.9]), tf.float32),
            tf.random.stateless_binomial([rows, 1], (1, 2), 200.0, 0.4, output_dtype=tf.float32),
        ]
        of_batch = tf.random.gamma([], 2.0) + tf.cast(tf.random.shuffle(tf.range(9))[0], tf.float32)
        classes, _, _ = tf.random.uniform_candidate_sampler(tf.zeros([rows, 1], tf.int64), 1, 3, True, 6)
        x = x * 0.1 + 0.01 * tf.reduce_sum(tf.concat(of_row, 1), 1, keepdims=True) + 0.01 * of_batch
        x += 0.1 * tf.reduce_sum(tf.one_hot(classes, 6), 0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - tf.reduce_sum(x, 1, keepdims=True)) ** 2) / BATCH
        update.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    for batch in strategy.experimental_distribute_dataset(data):
        train(batch)


@pytest.mark.slow  # test_draws_belong_to_the_row... has one; test_distributions.py has the distributions
def test_draws_of_every_distribution_belong_to_the_row_or_to_the_batch(recorded: Any) -> None:
    one = recorded(_drawing_rows, "1x1", reference=True)
    permuted = recorded(_drawing_rows, "1x1", reference=True, permute=True, noise_seed=3)
    three = recorded(_drawing_rows, "1x3")
    _same(one, permuted, atol=1e-5)
    _same(one, three, atol=1e-5)


@pytest.mark.slow  # test_shares_that_are_regrouped... and test_draws_belong_to_the_row... are fast
def test_draws_of_shares_are_those_of_the_replicas_whose_rows_they_are(recorded: Any) -> None:
    two = recorded(_dropout_loop)
    options: dict[str, Any] = {"reference": True, "replay": Replay(two.directory, shares=2, summed=True)}
    _same(two, recorded(_dropout_loop, "1x1", **options))
    _same(two, recorded(_dropout_loop, "1x1", permute=True, noise_seed=3, **options))


def _drawing_loop(rows: Any) -> None:
    """A step that is given nothing and draws the rows that it trains on."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    number = rows(strategy.num_replicas_in_sync)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        update = keras.optimizers.SGD(0.1)

    def step() -> Any:
        x = tf.random.normal((number, 2))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - tf.reduce_sum(x, 1, keepdims=True)) ** 2) / BATCH
        update.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train() -> Any:
        return strategy.reduce("SUM", strategy.run(step), axis=None)

    for _ in range(4):
        train()


def _of_all(replicas: int) -> int:
    return BATCH // replicas


def _of_each(replicas: int) -> int:
    return BATCH


def test_replicas_that_are_given_no_rows_draw_together_what_one_device_draws(recorded: Any) -> None:
    drawn = Facts.of(recorded(lambda: _drawing_loop(_of_all), "1x1", reference=True)).drawn
    assert list(drawn.values()) == [BATCH]
    one = recorded(lambda: _drawing_loop(_of_all), "1x1", reference=True, drawn=drawn)
    three = recorded(lambda: _drawing_loop(_of_all), "1x3", drawn=drawn)
    _same(one, three)
    each = recorded(lambda: _drawing_loop(_of_each), "1x2", drawn=drawn)  # as many on each: the same on each
    first, second = (step.gradients for _, step in sorted(each.steps("sgd")[0].items()))
    assert all(np.array_equal(first[name].read(), second[name].read()) for name in first)


def _applied_outside() -> None:
    """Gradients of Strategy.run that are added up, and applied, outside of it and of the scope."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    x, _ = arrays()
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        update = keras.optimizers.SGD(0.1)
        update.build(model.trainable_variables)

    def taken(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / BATCH
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x: Any, y: Any) -> None:
        parts = strategy.run(taken, args=(x, y))
        update.apply_gradients(
            [(strategy.reduce("SUM", part, axis=None), v) for part, v in zip(parts, model.trainable_variables, strict=True)]
        )

    for x, y in strategy.experimental_distribute_dataset(data):
        train(x, y)


def test_a_step_that_is_applied_outside_of_every_scope_has_the_rows_of_its_gradients(recorded: Any) -> None:
    one, two = (recorded(_applied_outside, topology) for topology in ("1x1", "1x2"))
    for trace in (one, two):
        assert [len(step[0].rows or ()) for step in trace.steps("sgd")] == [BATCH] * 4
        assert all(step[0].reduced for step in trace.steps("sgd"))
    _same(one, two)


def _loop_over_words() -> None:
    """A step that is given strings of any length, and looks them up."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    words = [b"a", b"", b"three", b"\xc3\xa4", b"a longer word"] * 8
    data = tf.data.Dataset.from_tensor_slices((words, [[float(k)] for k in range(40)])).batch(10)
    with strategy.scope():
        table = tf.Variable(tf.linspace(0.1, 0.9, 32)[:, None])

    def step(word: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.gather(table, tf.strings.to_hash_bucket_fast(word, 32))
            loss = tf.reduce_sum((found - y) ** 2) / 10
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tf.convert_to_tensor(tape.gradient(loss, table)))
        table.assign_sub(0.01 * gradient)
        return loss

    @tf.function
    def train(word: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(word, y)), axis=None)

    for word, y in strategy.experimental_distribute_dataset(data):
        train(word, y)


def test_rows_of_strings_are_replayed(recorded: Any) -> None:
    three = recorded(_loop_over_words, "1x3")
    again = recorded(_loop_over_words, "1x1", reference=True, replay=Replay(three.directory))
    _same(three, again)


def _two_updates_in_a_call() -> None:
    """Besides, each replica sees what the others have."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.05)

    def step(x: Any, y: Any) -> None:
        context = tf.distribute.get_replica_context()
        context.all_gather(x, axis=0)
        context.all_reduce("SUM", tf.reduce_sum(x, 0))
        for _ in range(2):
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_sum(losses) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        train(x, y)


def test_of_several_updates_in_a_call_the_first_is_made_of_all_shares_and_the_optimizer_is_told(recorded: Any) -> None:
    two = recorded(_two_updates_in_a_call)
    replayed = recorded(_two_updates_in_a_call, "1x1", reference=True, replay=Replay(two.directory, shares=2, summed=True))
    for name, gradient in _gradients(two, 0).items():
        np.testing.assert_allclose(gradient, _gradients(replayed, 0)[name], atol=1e-6)
    assert Facts.of(two).repeated == Facts.of(replayed).repeated == ["sgd"]
    assert Facts.of(two).gathers
    assert Facts.of(two).joins
    one_update = Facts.of(recorded(custom_loop))
    assert (one_update.repeated, one_update.gathers, one_update.joins) == ([], False, False)


@pytest.mark.slow  # test_draws_belong_to_the_row_whatever_its_position_and_replica has other draws
def test_whole_numbers_and_classes_belong_to_the_row_too(recorded: Any) -> None:
    one = recorded(corrupting_loop, "1x1", reference=True)
    _same(one, recorded(corrupting_loop, "1x1", reference=True, permute=True, noise_seed=3))
    _same(one, recorded(corrupting_loop, "1x3"))
    untouched = recorded(corrupting_loop, "1x1", reference=True, own_draws=True)
    kernels = [trace.steps("sgd")[0][0].gradients["weights"].read() for trace in (one, untouched)]
    assert abs(kernels[0] - kernels[1]).max() > 1e-3
    for step in recorded(corrupting_loop).steps("sgd"):
        assert len(step[0].draws) == 2
        assert not set(step[0].draws) & set(step[1].draws)  # a few numbers may be the same by chance: they are never compared


def test_a_function_within_a_tf_function_has_what_it_calls_converted_by_autograph(recorded: Any) -> None:
    one, two = recorded(nested_loop, "1x1", reference=True), recorded(nested_loop)
    _same(one, two)


def test_untouched_draws_are_recorded_and_keras_draws_the_same_on_every_replica(recorded: Any) -> None:
    trace = recorded(_dropout_loop)
    for step in trace.steps("sgd"):
        assert len(step[0].draws) == 1
        assert step[0].draws == step[1].draws


def _clipping_loop(what: str) -> None:
    """A step that clips: its gradients, in one of two ways, or its weights; and always on the way to a loss and in a metric."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
        optimizer, auc = keras.optimizers.SGD(0.1), keras.metrics.AUC()

    def step(x: Any) -> None:
        y = tf.cast(x[:, :1] > 0, tf.float32)
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            losses = keras.losses.binary_crossentropy(y, tf.clip_by_value(p, 0.01, 0.99))
            loss = tf.reduce_sum(losses) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        auc.update_state(y, p)
        if what == "keras":
            gradients = [keras.ops.clip(g, -0.01, 0.01) for g in gradients]
        elif what == "norm":
            gradients, _ = tf.clip_by_global_norm([2.0 * g for g in gradients], 0.01)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for weight in model.trainable_variables if what == "weights" else ():
            weight.assign(tf.clip_by_value(weight, -0.1, 0.1))

    @tf.function
    def train(x: Any) -> None:
        strategy.run(step, args=(x,))

    x, _ = arrays()
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(BATCH)):
        train(batch)


@pytest.mark.parametrize(
    ("what", "seen"),
    [("nothing", []), ("weights", []), ("keras", ["clip_by_value"]), ("norm", ["clip_by_global_norm"])],
)
def test_what_clips_gradients_is_told_from_what_losses_metrics_and_weights_clip(
    recorded: Any, what: str, seen: list[str]
) -> None:
    assert Facts.of(recorded(lambda: _clipping_loop(what))).clipped_by == seen


def _averaging_loop(averages: bool) -> None:
    """A program that puts something else in the place of one variable when it has trained."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, _ = arrays()
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
    if averages:
        model.variables[0].assign(0.5 * model.variables[0])


@pytest.mark.parametrize(("averages", "changed"), [(True, ["sequential/dense/kernel"]), (False, [])])
def test_what_a_program_makes_of_its_weights_when_it_has_trained_is_seen(
    recorded: Any, averages: bool, changed: list[str]
) -> None:
    trace = recorded(lambda: _averaging_loop(averages), steps=None)
    assert [event["changed"] for _, event in trace.of("left")] == [changed] * len(trace.replicas)
    for (_, replica), found in trace.variables("left").items():
        assert list(found) == changed
        for name, variable in found.items():
            assert (variable.array is not None) == (replica == 0)  # the same on all
            after = trace.steps("sgd")[-1][0].weights[name].array
            assert after is not None
            assert variable.array is None or np.array_equal(variable.array.read(), 0.5 * after.read())


def test_without_clipping_an_optimizer_does_not_clip(recorded: Any) -> None:
    def clipped() -> None:
        import keras

        custom_loop(optimizer=keras.optimizers.SGD(0.1, clipnorm=1e-3))

    plain = recorded(clipped, "1x1", reference=True)
    free = recorded(clipped, "1x1", reference=True, switches=frozenset({"no-clipping"}))
    facts = [event for _, event in plain.of("program")][-1]
    assert facts["optimizers"]["sgd"]["clipnorm"] == 1e-3

    def change(trace: Trace) -> float:
        before = trace.variables("initial")[(0, 0)]["sequential/dense/kernel"].array.read()
        return float(np.linalg.norm(trace.steps("sgd")[0][0].weights["sequential/dense/kernel"].array.read() - before))

    assert change(free) > 10 * change(plain)


def test_gradients_of_16_bits_are_moved_where_they_cancel_and_stay_zero_where_they_are(recorded: Any) -> None:
    def cancelling() -> None:
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        weights = tf.Variable([1.0, 1.0, 1.0])
        update = tf.compat.v1.train.GradientDescentOptimizer(0.0)

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights * tf.constant([1.0, 1e-7, 0.0]))
            update.apply_gradients([(tape.gradient(loss, weights), weights)])

        strategy.run(step)

    def gradient(*, short: bool) -> Any:
        trace = recorded(cancelling, "1x1", reference=True, steps=9, perturb=8192.0, noise_seed=1, short=short)
        return trace.steps(trace.optimizers[0])[0][0].gradients["Variable"].read()

    whole, short = gradient(short=False), gradient(short=True)
    assert abs(whole[1] / 1e-7 - 1) < 2e-3
    assert abs(short[1] / 1e-7 - 1) > 1
    assert abs(short[0] - 1) < 2e-3
    assert whole[2] == short[2] == 0


def _mean_loop() -> None:
    """Each replica divides the mean over its own rows by the number of replicas; a term beside it is not divided."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
            loss += 0.1 * tf.reduce_sum(model.trainable_variables[0] ** 3)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        strategy.run(step, args=(x, y))


def test_a_program_on_one_replicas_rows_after_the_other_divides_by_their_number(recorded: Any) -> None:
    two = recorded(_mean_loop)
    _same(two, recorded(_mean_loop, "1x1", reference=True, replay=Replay(two.directory, shares=2, summed=True, told=2)))


def _two_phases() -> None:
    """A model trained by one optimizer, by another, and by both in one call; batches grow with the replicas."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])
        first, second = keras.optimizers.SGD(0.1, name="first"), keras.optimizers.SGD(0.01, name="second")
    batch = BATCH // 2 * strategy.num_replicas_in_sync

    def step(x: Any, y: Any, optimizers: Any) -> None:
        for optimizer in optimizers:
            with tf.GradientTape() as tape:
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_sum(loss) / BATCH
            optimizer.apply_gradients([(tape.gradient(loss, model.trainable_variables)[0], model.trainable_variables[0])])

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(batch))
    for optimizers, (x, y) in zip(([first], [second], [first, second], [second]), data, strict=False):
        strategy.run(step, args=(x, y, optimizers))


def test_each_step_of_a_replay_has_its_own_rows_whichever_optimizer_makes_it(recorded: Any) -> None:
    two = recorded(_two_phases)
    replayed = recorded(_two_phases, "1x1", reference=True, replay=Replay(two.directory))
    for optimizer, steps in (("first", 2), ("second", 3)):
        assert len(two.steps(optimizer)) == steps
        for ours, theirs in zip(replayed.steps(optimizer), two.steps(optimizer), strict=True):
            assert list(ours[0].rows) == [row for replica in sorted(theirs) for row in theirs[replica].rows]


def test_what_has_no_kernel_on_gpus_is_made_on_the_cpu_whatever_device_a_replica_has(recorded: Any, preload: Preload) -> None:
    other = recorded(custom_loop).directory

    def place() -> dict[str, list[str]]:
        import tensorflow as tf

        from emulate import graph_functions
        from emulate.interventions.gradients import LocalGradients
        from emulate.interventions.rows import Rows, permuted

        def made(build: Any) -> list[str]:
            with tf.Graph().as_default() as graph, graph_functions.device("GPU:1"):
                build(tf.zeros([BATCH, 8]), tf.zeros([BATCH], tf.int64))
            return [op.device for op in graph.get_operations() if op.type in ("RandomIndexShuffle", "PyFunc")]

        return {
            "permuted": made(lambda *rows: permuted(1, rows, {})),
            "replayed": made(lambda *rows: Rows(Replay(other))._replaced(rows, {}, None)),
            "rounded": made(lambda *rows: LocalGradients(other).in_step("sgd", "w", tf.zeros([8, 3]), sum)),
        }

    with Cluster("1x2", device="cpu", preload=preload) as cluster:  # where GPU:1 is CPU:1
        assert cluster.run(place) == [{key: ["/device:CPU:0"] for key in ("permuted", "replayed", "rounded")}]


def _parts_loop() -> None:
    """A step that takes its batch in two parts, and another model's batch twice over."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    with strategy.scope():
        layers = (keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(3))
        model = keras.Sequential([keras.Input((6,)), *layers])
        update = keras.optimizers.SGD(0.1)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> Any:
        half = tf.shape(y)[0] // 2
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(loss_of(y[of], model(x[of], training=True))) for of in (slice(half), slice(half, None)))
            both = tf.nn.softmax(model(tf.concat([x, x], 0), training=True))
            one, other = tf.split(both, 2)
            loss = (loss + tf.reduce_sum(tf.square(one - other))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        update.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(tf.abs(one - other))

    train = tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None))
    apart = [float(train(x, y)) for x, y in strategy.experimental_distribute_dataset(data)]
    assert min(apart) > 0.1, apart  # an example that is there twice has two masks


@pytest.mark.slow  # test_draw_keys.py has the keys
def test_draws_follow_an_example_into_parts_of_the_batch_and_into_a_batch_that_is_there_twice(recorded: Any) -> None:
    one = recorded(_parts_loop, "1x1", reference=True)
    permuted = recorded(_parts_loop, "1x1", reference=True, permute=True, noise_seed=3)
    three = recorded(_parts_loop, "1x3")
    _same(one, permuted)
    _same(one, three)
