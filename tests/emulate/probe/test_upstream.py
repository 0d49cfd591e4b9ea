"""Fails when TensorFlow or Keras changes a private name that the probe uses. Each runs in a process of its own kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emulate import graph_functions, upstream
from emulate.cluster import Cluster, Preload
from emulate.instrument import constants, optimizers
from emulate.interventions import enlarge_rates, tell_numbers
from emulate.recorder import Replay
from emulate.recorder.lines import stack_lines
from tests.versions import since


@pytest.fixture(scope="module")
def host(preload: Preload) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function in a host that has TensorFlow and both Keras."""
    with Cluster("1x2", preload=preload) as cluster:
        yield lambda function: cluster.run(function)[0]


@pytest.fixture
def fresh_host(preload: Preload) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """The same, of its own: what is changed in it nobody else sees."""
    with Cluster("1x2", preload=preload) as cluster:
        yield lambda function: cluster.run(function)[0]


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_run_and_reduce_are_defined_once_for_all_strategies(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        classes = graph_functions.strategy_classes()
        derived = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
        return [cls.__name__ for cls in classes], [cls.run is classes[0].run for cls in derived], _parameters(classes[0].run)

    names, same, parameters = host(look)
    assert names == ["StrategyBase"]
    assert all(same)
    assert parameters == ["self", "fn", "args", "kwargs", "options"]


def test_optimizers_of_keras_3_apply_through_one_method_with_this_signature(host: Any) -> None:
    def look() -> Any:
        import keras

        found = upstream.optimizers(upstream.KERAS_3)
        own = [cls for cls in (keras.optimizers.SGD, keras.optimizers.Adam) if "apply" in vars(cls)]
        inner = upstream.inner_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
        return [(cls.__name__, _parameters(getattr(cls, name))) for cls, name in found], own, type(inner).__name__

    found, own, inner = host(look)
    assert found == [(name, ["self", "grads", "trainable_variables"]) for name in ("BaseOptimizer", "LossScaleOptimizer")]
    assert own == []
    assert inner == "SGD"


def test_optimizers_of_tf_keras_apply_through_these_classes(host: Any) -> None:
    def look() -> list[str]:
        applies = [*upstream.optimizers("tensorflow"), *upstream.optimizers("tf_keras.src")]
        return [f"{cls.__name__}.{name}" for cls, name in applies]

    names = ("Optimizer", "_BaseOptimizer", "Optimizer", "OptimizerV2", "LossScaleOptimizer", "LossScaleOptimizerV3")
    assert host(look) == [f"{name}.apply_gradients" for name in names]


def test_classes_of_both_keras_are_where_the_probe_looks(host: Any) -> None:
    def look() -> list[list[str]]:
        import keras  # noqa: F401
        import tf_keras  # noqa: F401

        finders = (upstream.layer_classes, upstream.metric_classes, upstream.callback_list_classes)
        of_batchnorm = [upstream.batchnorm_class(package) for package in upstream.KERAS_PACKAGES.values()]
        return [[cls.__module__.partition(".")[0] for cls in found] for found in (*(one() for one in finders), of_batchnorm)]

    assert host(look) == [["keras", "tf_keras"]] * 4


def test_replicas_share_the_variables_of_metrics_up_to_keras_3_9(host: Any) -> None:
    def look() -> bool:
        import keras  # noqa: F401

        return upstream.mirrored_metric_class() is None

    assert host(look) is since("keras", "3.10")


def test_whether_a_tape_records_is_known(host: Any) -> None:
    def look() -> list[bool]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            within = upstream.is_recording()
            with tape.stop_recording():
                stopped = upstream.is_recording()
        return [within, stopped, upstream.is_recording()]

    assert host(look) == [True, False, False]


def test_every_random_op_takes_what_it_took(host: Any) -> None:
    def look() -> list[list[str]]:
        needed = {
            "integer": {"shape", "minval", "maxval"},
            "categorical": {"logits", "num_samples"},
            "gamma": {"shape", "alpha"},
            "binomial": {"shape", "counts", "probs"},
        }
        ops = [(*op, needed.get(op[2], {"shape"})) for op in upstream.random_ops()]
        ops += [(*op, "shuffle", {"value"}) for op in upstream.shuffles()]
        ops += [(*op, "candidates", {"seed", "seed2"}) for op in upstream.candidate_samplers()]
        return [sorted(names - set(_parameters(getattr(module, name)))) for module, name, _, names in ops]

    assert host(look) == [[]] * 24


def test_a_tf_function_is_cloned_around_another_body_and_stays_one(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        clone = graph_functions.clone_function(tf.function(lambda x: x + 1), lambda x: x + 2)
        converted = graph_functions.convert(clone)
        return graph_functions.is_function(converted), int(clone(tf.constant(1)))

    assert host(look) == (True, 3)


def test_tensors_of_any_type_and_shape_are_packed_and_unpacked(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        packed = upstream.pack([tf.constant([1.0, 2.0]), tf.constant("text"), tf.zeros([0, 3], tf.int64)])
        numbers, text, nothing = upstream.unpack(packed, [tf.float32, tf.string, tf.int64])
        return [numbers.numpy().tolist(), bytes(text.numpy()), nothing.numpy().tolist()]

    assert host(look) == [[1.0, 2.0], b"text", []]


def test_copies_of_mirrored_and_auto_casting_variables_are_found(host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf
        import tf_keras

        with tf.distribute.MirroredStrategy().scope():
            mirrored = tf.Variable(1.0)
            of_keras = keras.Variable(1.0)
            layer = tf_keras.layers.Dense(1, dtype="mixed_float16")
            layer.build((1, 1))
        variables = (tf.Variable(1.0), mirrored, of_keras, layer.kernel)
        return [[type(copy).__name__ for copy in upstream.local_copies(variable)] for variable in variables]

    plain = "ResourceVariable"
    assert host(look) == [[plain], [plain] * 2, [plain] * 2, [plain] * 2]


def test_a_layer_knows_its_own_weights_apart_from_those_of_the_layers_in_it(host: Any) -> None:
    def look() -> Any:
        import keras
        import tf_keras

        found = []
        for package in (keras, tf_keras):
            model = package.Sequential([package.layers.Dense(2)])
            model.build((None, 3))
            found.append([len(upstream.own_weights(layer)) for layer in (model, model.layers[0])])
        return found

    assert host(look) == [[0, 2]] * 2


def test_a_policy_says_in_one_method_what_a_layer_computes_in_and_keeps_its_weights_in(host: Any) -> None:
    def look() -> Any:
        import keras
        import tf_keras

        made = [
            cls("mixed_bfloat16")
            for cls in (keras.dtype_policies.DTypePolicy, tf_keras.mixed_precision.Policy, *upstream.policy_classes())
        ]
        return [(one._parse_name("float16"), one._parse_name(one.name), one.compute_dtype, one.variable_dtype) for one in made]

    of_mixed = ("bfloat16", "float32")
    assert [tuple(map(tuple, found[:2])) + tuple(found[2:]) for found in host(look)] == [
        (("float16", "float16"), of_mixed, *of_mixed)
    ] * 4


def test_collectives_start_in_these_methods(host: Any) -> None:
    def look() -> list[list[str]]:
        launcher = graph_functions.collective_launcher()
        return [_parameters(getattr(launcher, name))[:2] for name in ("all_reduce", "_all_gather")]

    assert host(look) == [["self", "input_tensor"]] * 2


def test_the_places_where_tensorflow_writes_files_have_these_parameters(host: Any) -> None:
    def look() -> list[tuple[str, list[str]]]:
        writers = [*upstream.file_writers(), upstream.checkpoint_writer()]
        return [(name, _parameters(getattr(owner, name))[:2]) for owner, name, _ in writers]

    assert host(look) == [
        ("_prewrite_check", ["self"]),
        ("rename_v2", ["src", "dst"]),
        ("create_summary_file_writer", ["writer", "logdir"]),
        ("save", ["self", "file_prefix"]),
    ]


def test_the_places_where_tensorflow_reads_files_have_these_parameters(host: Any) -> None:
    def look() -> tuple[list[tuple[str, list[str]]], bool]:
        file_io = upstream.load("tensorflow.python.lib.io.file_io")
        found = [(name, _parameters(getattr(owner, name))) for owner, name, _ in upstream.file_readers()]
        return found, file_io.FileIO("", "r")._read_buf is None

    assert host(look) == ([("_preread_check", ["self"]), ("NewCheckpointReader", ["filepattern"])], True)


def test_a_function_traces_the_python_function_that_is_put_in_its_place_with_values_read_at_each_call(fresh_host: Any) -> None:
    def look() -> tuple[list[float], bool]:
        import itertools

        import tensorflow as tf

        numbers = itertools.count(1)

        def wrapped(function: Any, *, autograph: bool) -> Any:
            def given(x: Any) -> Any:
                graph = tf.compat.v1.get_default_graph()
                read = graph_functions.value_at_call(graph, lambda: tf.constant(float(next(numbers))), tf.TensorSpec([]))
                return function(x) + read

            return given if autograph else function

        function = tf.function(lambda x: 10.0 * x, jit_compile=True)
        graph_functions.wrap_traced(function, wrapped)
        return [float(function(tf.constant(1.0))) for _ in range(3)], hasattr(function, "_gpudist_wrapped")

    assert fresh_host(look) == ([11.0, 12.0, 13.0], True)


def test_every_variable_is_assigned_through_these_methods(host: Any) -> None:
    def look() -> list[bool]:
        classes = upstream.variable_classes()
        return [
            {"assign", "assign_add", "assign_sub"} <= set(vars(cls)) or cls.__name__ == "MirroredVariable" for cls in classes
        ] + [all(hasattr(cls, name) for name in ("aggregation", "synchronization", "dtype")) for cls in classes]

    assert host(look) == [True] * 12


def test_every_constant_of_a_graph_is_made_in_one_place_and_knows_the_line_of_the_program(host: Any) -> None:
    def look() -> Any:
        import numpy as np
        import tensorflow as tf

        module, name = upstream.constant_maker()
        original, made = getattr(module, name), []
        setattr(module, name, lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1])
        table = np.arange(12.0)
        try:
            tf.function(lambda i: tf.gather(table, i) + tf.constant(1.0, tf.float64)).get_concrete_function(
                tf.TensorSpec([], tf.int32)
            )
        finally:
            setattr(module, name, original)
        return [one.shape.as_list() for one in made if one.dtype == tf.float64], [stack_lines.place_of(one.op) for one in made]

    shapes, lines = host(look)
    assert shapes == [[12], []]
    assert all(line.startswith("test_upstream.py:") for line in lines)


def test_stages_of_a_pipeline_that_draw_are_seen(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        def shift(x: Any) -> Any:
            return x + tf.random.uniform([], maxval=3, dtype=tf.int64)

        numbers = tf.data.Dataset.range(4)
        every = numbers.shuffle(4).map(shift).batch(2)
        once = numbers.shuffle(4, reshuffle_each_iteration=False).map(lambda x: x + 1)
        return [upstream.random_stages(one) for one in (every, once)], isinstance(every, upstream.dataset_class())

    assert host(look) == ([["shuffle", "map(shift)"], []], True)


def test_stages_that_draw_by_a_number_are_told_apart_by_function_and_first_number(fresh_host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        constants.remember_first_numbers()

        def stage(start: int, scale: float = 1.0) -> Any:
            numbered = tf.data.Dataset.range(8).map(lambda x: x + 1).enumerate(start)
            return upstream.drawing_stage(numbered.map(lambda i, x: scale * tf.random.stateless_normal([2], tf.stack([i, x]))))

        plain = tf.data.Dataset.range(8).map(lambda x: x + 1)
        return [stage(0), stage(0), stage(5), stage(0, 2.0)], upstream.drawing_stage(plain)

    (one, same, elsewhere, other), plain = fresh_host(look)
    assert one == same
    assert (one["stage"], one["seeds"]) == ("map(<lambda>)", [])
    assert len({stage["function"] for stage in (one, elsewhere, other)}) == 3
    assert plain is None


def test_the_order_that_keras_draws_for_arrays_is_no_stage_that_draws_for_examples(fresh_host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        maps: list[Any] = []
        make = tf.data.Dataset.map
        tf.data.Dataset.map = lambda *args, **kwargs: maps.append(make(*args, **kwargs)) or maps[-1]
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(tf.zeros((4, 1)), tf.zeros((4, 1)), verbose=0)
        drawn = [op.type for one in maps for _, graph in upstream.functions_of(one) for op in graph.get_operations()]
        return "RandomShuffle" in drawn, [stage for one in maps if (stage := upstream.drawing_stage(one)) is not None]

    assert fresh_host(look) == (True, [])


def test_the_number_of_replicas_is_told_in_these_places_and_asked_for_by_these_scalers_of_losses(fresh_host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf
        import tf_keras

        tell_numbers(Replay(Path(), told=3))
        asked: list[Any] = [tf.distribute.get_strategy().num_replicas_in_sync]
        asked.append(tf.distribute.get_replica_context().num_replicas_in_sync)
        asked.append(float(tf.nn.scale_regularization_loss(6.0)))
        asked.append(float(tf.nn.compute_average_loss([6.0])))
        rows = tf.constant([[1.0], [1.0]]), tf.constant([[3.0], [3.0]])
        asked.append(round(float(keras.losses.MeanSquaredError()(*rows)), 5))
        asked.append(round(float(tf_keras.losses.MeanSquaredError()(*rows)), 5))
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            asked.append(strategy.extended._num_replicas_in_sync)
        return asked

    known: list[Any] = fresh_host(look)
    assert known[:4] == [3, 3, 2.0, 2.0]
    assert known[-1] == 1
    assert known[4:6] == [1.33333, 4.0]  # Keras 3 always scales, Keras 2 in its `fit` alone


def test_what_a_tf_function_makes_gets_its_values_after_the_trace_and_before_it_runs(fresh_host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        seen: list[Any] = []
        cls = graph_functions.function_class()
        original = getattr(cls, graph_functions.INITIALIZES)

        def initialize(function: Any, *args: Any) -> Any:
            result = original(function, *args)
            seen.append([float(v) for v in made])
            return result

        setattr(cls, graph_functions.INITIALIZES, initialize)
        made: list[Any] = []

        @tf.function
        def add() -> Any:
            if not made:
                made.append(tf.Variable(2.0))
            return made[0].assign_add(1.0)

        return seen, float(add()), seen

    assert fresh_host(look)[1:] == (3.0, [[2.0]])


def test_a_coordinator_gives_closures_to_the_threads_of_its_workers_through_one_queue(host: Any) -> None:
    def look() -> Any:
        import inspect

        names = upstream.coordination()
        source = {name: inspect.getsource(getattr(names, name)) for name in _OF_A_COORDINATOR}
        has = {name: [text in source[name] for text in _OF_A_COORDINATOR[name]] for name in source}
        methods = (
            (names.remote_value, "fetch"),
            (names.remote_value, "get"),
            (names.coordinator, "join"),
            (names.coordinator, "done"),
        )
        found = [hasattr(cls, name) for cls, name in methods]
        return [_parameters(getattr(names.queue, name)) for name in ("get", "put", "put_back")], has, found

    parameters, has, found = host(look)
    assert parameters == [["self", "timeout", "tag"], ["self", "closure", "tag"], ["self", "closure"]]
    assert all(all(texts) for texts in has.values()), has
    assert all(found)


_OF_A_COORDINATOR = {
    "cluster": ("self.closure_queue = ", "self.workers = ", "closure_queue.put(closure)"),
    "worker": ("closure_queue.get(tag=self.worker_index)", "def _process_closure(self, closure)"),
    "closure": ("self._args", "self._kwargs", "self._concrete_function"),
    "queue": (
        "self._queue_lock",
        "self._should_process_closures",
        "self._closures_queued_condition",
        "self._tagged_queue",
        "self._queue_free_slot_condition",
        "self.inflight_closure_count += 1",
        "self._inflight_closure_count",
        "def mark_finished(self)",
        "def mark_failed(self",
    ),
}


def test_the_learning_rate_that_an_optimizer_starts_with_is_known(host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf
        import tf_keras

        warming = keras.optimizers.schedules.PolynomialDecay(0.0, 10, 1.0)
        with tf.distribute.MirroredStrategy().scope():
            made = [keras.optimizers.SGD(0.25), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))]
        others = [keras.optimizers.SGD(warming), tf_keras.optimizers.Adam(0.125), object()]
        return [optimizers.first_rate(one) for one in (*made, *others)]

    assert host(look) == [0.25, 0.5, pytest.approx(0.1), 0.125, None]


def test_every_step_of_a_keras_3_optimizer_asks_for_its_learning_rate_in_one_place(fresh_host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf

        enlarge_rates(4.0)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)
        found = []
        for optimizer in (keras.optimizers.SGD(0.25), keras.optimizers.SGD(schedule), keras.optimizers.SGD(0.25, momentum=0.5)):
            weight = keras.Variable([1.0])
            optimizer.apply([tf.constant([1.0])], [weight])
            found.append(float(weight.numpy()[0]))
        return found

    assert fresh_host(look) == [0.0, 0.0, 0.0]


def test_operations_of_graphs_and_collectives_of_replicas_are_made_where_the_lines_are_recorded(host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf

        graph = upstream.function_graph_class()
        found = [name in vars(cls) for cls, name in upstream.replica_collectives()]
        options = "__setattr__" in vars(upstream.options_class())
        checkpoint = upstream.checkpoint_class() is tf.train.Checkpoint
        layers = upstream.layer_classes_of("keras") == [keras.Layer]
        return "_create_op_internal" in vars(graph), found, options, checkpoint, layers

    assert host(look) == (True, [True, True], True, True, True)


def test_a_graph_knows_the_operations_of_the_functions_that_it_calls(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        @tf.function
        def outer(x: Any) -> Any:
            return tf.cond(x > 0, lambda: tf.square(x), lambda: tf.exp(x))

        graph = outer.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
        (branches,) = (one for one in graph.get_operations() if one.type == "StatelessIf")
        names = [branches.get_attr(name).name for name in ("then_branch", "else_branch")]
        return [{one.type for one in upstream.body_of(graph, name).get_operations()} & {"Square", "Exp"} for name in names]

    assert host(look) == [{"Square"}, {"Exp"}]


def test_autograph_tells_which_line_each_of_its_lines_was_made_of(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        module, name = upstream.converter()

        def function(x: Any) -> Any:
            return x + 1

        options = tf.autograph.experimental.Feature  # imported, so that the converter is
        del options
        api = graph_functions.load("tensorflow.python.autograph.core.converter")
        converted = getattr(module, name)(function, api.ProgramContext(options=api.ConversionOptions(recursive=True)))
        code = function.__code__
        return (code.co_filename, code.co_firstlineno + 1) in dict(upstream.origins_of(converted)).values()

    assert host(look)


def test_operations_of_eager_code_are_seen_with_the_numbers_of_their_tensors(host: Any) -> None:
    def look() -> Any:
        import tensorflow as tf

        seen: list[Any] = []

        def see(kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
            seen.append((kind, [upstream.tensor_number(one) for one in inputs], upstream.tensor_number(outputs[0]), graph))

        x = tf.ones([2])
        with upstream.watching_operations(see):
            y = tf.square(x)
        tf.square(y)
        return [
            (kind, inputs == [upstream.tensor_number(x)], number == upstream.tensor_number(y), graph)
            for kind, inputs, number, graph in seen
        ]

    assert host(look) == [("Square", True, True, None)]


def test_the_stack_of_a_call_has_its_file_and_line(host: Any) -> None:
    def look() -> Any:
        here = inspect.currentframe()
        assert here is not None
        return (
            upstream.stack()[-1] == (here.f_code.co_filename, here.f_lineno)
            or (here.f_code.co_filename, here.f_lineno) in upstream.stack()
        )

    assert host(look)


def test_optimizers_of_tf_keras_update_by_xla_in_the_function_of_this_name(host: Any) -> None:
    def look() -> Any:
        import tf_keras

        return hasattr(tf_keras.optimizers.Optimizer, upstream.UPDATE_BY_XLA)

    assert host(look)
