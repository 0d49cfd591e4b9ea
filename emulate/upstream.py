"""Collect the private names of TensorFlow, Keras and tf_keras, and read names and values of variables.

Tests (`tests/emulate/probe/test_upstream.py`, `tests/emulate/faults/test_upstream.py`) fail when upstream changes one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from emulate.graph_functions import load
from emulate.imports import tf
from gpudist_core.installed import installed_version, release

KERAS_PACKAGES = {"keras": "keras.src", "tf_keras": "tf_keras.src"}
"""Package with the private names of each module that a program may import as Keras."""
# TensorFlow 2.15 comes with Keras 2.15 as `keras`. Since then only tf_keras is Keras 2.
IS_KERAS_2 = release(installed_version("keras") or "3.0") < (3, 0)
KERAS_3 = "no_keras_3.src" if IS_KERAS_2 else "keras.src"
LEGACY_KERAS = tuple(package for package in KERAS_PACKAGES.values() if package != KERAS_3)

# The class behind every public strategy, whose `run` gets each replica's input (TF 2.21).
strategy_class = partial(load, "tensorflow.python.distribute.distribute_lib", "StrategyBase")
# The class with `replica_id_in_sync_group` (TF 2.21).
numbered = partial(load, "tensorflow.python.distribute.distribute_lib", "ReplicaContextBase")
tape_class = partial(load, "tensorflow.python.eager.backprop", "GradientTape")  # `tf.GradientTape`
# The module in which Keras 3 divides a loss by the number of replicas: `scale_loss_for_distribution`.
keras_loss_module = partial(load, f"{KERAS_3}.losses.loss")
# The module whose `get_seed` combines the global seed and an operation's own (TF 2.21).
seed_module = partial(load, "tensorflow.python.framework.random_seed")
dataset_class = partial(load, "tensorflow.python.data.ops.dataset_ops", "DatasetV2")  # the class behind every `tf.data.Dataset`
# The class that prepares the data of `fit` and `evaluate` in Keras 3.
epoch_iterator_class = partial(load, f"{KERAS_3}.trainers.epoch_iterator", "EpochIterator")
# The class of a tf.function's graph (TF 2.21). Its `_create_op_internal` makes each operation, its
# `capture_call_time_value` gives collectives their keys.
function_graph_class = partial(load, "tensorflow.python.framework.func_graph", "FuncGraph")
# The class whose attributes are the options of datasets, `auto_shard_policy` among them (TF 2.21).
options_class = partial(load, "tensorflow.python.data.util.options", "OptionsBase")
checkpoint_class = partial(load, "tensorflow.python.checkpoint.checkpoint", "Checkpoint")  # `tf.train.Checkpoint`


def _imported(name: str, *modules: str) -> list[Any]:
    """Return what has this name in those of the modules that are imported."""
    return [getattr(sys.modules[module], name) for module in modules if module in sys.modules]


KERAS_LAYERS = (f"{KERAS_3}.layers.layer", *(f"{package}.engine.base_layer" for package in LEGACY_KERAS))
# Of the imported Keras versions. Every log of `fit` passes a CallbackList.
layer_classes = partial(_imported, "Layer", *KERAS_LAYERS)
_METRICS = (f"{KERAS_3}.metrics.metric", *(f"{package}.metrics.base_metric" for package in LEGACY_KERAS))
metric_classes = partial(_imported, "Metric", *_METRICS)
_CALLBACKS = (f"{KERAS_3}.callbacks.callback_list", *(f"{package}.callbacks" for package in LEGACY_KERAS))
callback_list_classes = partial(_imported, "CallbackList", *_CALLBACKS)

UPDATE_BY_XLA = "_update_step_xla"
"""In this function an optimizer of tf_keras updates one variable where there is a GPU (2.20); the step alone calls it."""


def num_local_replicas(strategy: Any) -> int:
    """Return how many replicas a strategy has on this host. The default strategy counts as one."""
    try:
        return len(strategy.extended.worker_devices)
    except (RuntimeError, AttributeError):
        return 1


def replica_counters() -> list[Any]:
    """Return the classes with `num_replicas_in_sync` (TF 2.21)."""
    return [strategy_class(), numbered()]


def coordination() -> SimpleNamespace:
    """Return the classes behind `ClusterCoordinator`, through which it schedules work (TF 2.21)."""
    module = load("tensorflow.python.distribute.coordinator.cluster_coordinator")
    values = load("tensorflow.python.distribute.coordinator.values")
    return SimpleNamespace(
        coordinator=module.ClusterCoordinator,
        cluster=module.Cluster,
        worker=module.Worker,
        queue=module._CoordinatedClosureQueue,
        closure=module.Closure,
        resource_closure=module.ResourceClosure,
        remote_value=values.RemoteValueImpl,
    )


LOSS_SCALERS = (
    "tensorflow.python.ops.nn_impl",
    f"{KERAS_3}.losses.loss",
    *(f"{package}.utils.losses_utils" for package in LEGACY_KERAS),
    *(f"{package}.engine.compile_utils" for package in LEGACY_KERAS),
)
"""Modules that divide a program's loss by the number of replicas in its place."""


def averages(reduce_op: Any) -> bool:
    """Return whether a reduction is a mean: `tf.distribute.ReduceOp.MEAN`, or its name in any case."""
    return str(getattr(reduce_op, "name", reduce_op)).upper() == "MEAN"


def modules_with_gradients() -> list[Any]:
    """Return the modules of which a program may call `gradients`, the function of graphs (TF 2.21)."""
    return [load("tensorflow"), tf.compat.v1]


def is_recording() -> bool:
    """Return whether a gradient tape of this thread records."""
    return bool(load("tensorflow.python.eager.record").could_possibly_record())


def pack(tensors: list[Any]) -> Any:
    """Put tensors of any type and shape into one variant, by reference."""
    return load("tensorflow.python.ops.gen_optional_ops").optional_from_value(tensors)


def unpack(variant: Any, dtypes: list[Any]) -> list[Any]:
    """Return the tensors of `pack`."""
    ops = load("tensorflow.python.ops.gen_optional_ops")
    return list(ops.optional_get_value(variant, dtypes, [None] * len(dtypes)))


def control_flow_root(graph: Any) -> Any:
    """Return the function around the conditions and loops of a graph: they are never called from elsewhere (TF 2.21)."""
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def handle_of(variable: Any) -> Any:
    """Return the tensor by which graphs capture a variable of one device; None of others."""
    return getattr(variable, "_handle", None)


def value_of(handle: Any) -> Any:
    """Return the value of the variable with a handle; None of one without a value, and of other resources."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    spec = data.shape_and_type[0]
    try:
        value = tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(spec.dtype)))
    except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        return None
    return value if tf.TensorShape(spec.shape).is_compatible_with(value.shape) else None  # empty before it is initialized


def eager_origin(tensor: Any, graph: Any) -> Any:
    """Return the eager tensor that a graph captures in the end by a tensor of an outer graph; None where that computes it."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        graph = getattr(graph, "outer_graph", None)
        outers = [outer for outer, inner in getattr(graph, "captures", ()) if inner is tensor]
        if not outers:
            return None
        tensor = outers[0]
    return tensor


def register_functions(graph_def: Any) -> None:
    """Make the functions that a GraphDef brings along known: an import into a `tf.function` alone does not (TF 2.21)."""
    context = load("tensorflow.python.eager.context").context()
    for definition in graph_def.library.function:
        if not context.has_function(definition.signature.name):
            context.add_function_def(definition)


def optimizers(package: str) -> list[tuple[Any, str]]:
    """Return (class, method) of every apply that can end a training step, of TensorFlow 1, Keras 3 or tf_keras.

    Args:
        package: `tensorflow`, or one of `KERAS_PACKAGES`.

    Returns:
        The classes that define the method themselves.
    """
    if package == KERAS_3:
        scale = load(f"{KERAS_3}.optimizers.loss_scale_optimizer").LossScaleOptimizer
        return [(load(f"{KERAS_3}.optimizers.base_optimizer").BaseOptimizer, "apply"), (scale, "apply")]
    if package in LEGACY_KERAS:
        optimizer = load(f"{package}.optimizers.optimizer")
        scale = load(f"{package}.mixed_precision.loss_scale_optimizer")
        version_2 = load(f"{package}.optimizers.legacy.optimizer_v2").OptimizerV2
        classes = [
            optimizer._BaseOptimizer,
            optimizer.Optimizer,
            version_2,
            scale.LossScaleOptimizer,
            scale.LossScaleOptimizerV3,
        ]
    else:
        classes = [load("tensorflow.python.training.optimizer").Optimizer]
    return [(cls, "apply_gradients") for cls in classes if "apply_gradients" in vars(cls)]


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or None."""
    return getattr(optimizer, "inner_optimizer", None) or getattr(optimizer, "_optimizer", None)


def numbers_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer that are single numbers: counts, rates, scales."""
    variables = getattr(optimizer, "variables", ())
    return [v for v in (variables() if callable(variables) else variables) if not len(v.shape)]


def has_compiled_loss(model: Any) -> bool:
    """Return whether a Keras model (Keras 3 or 2) was compiled with a loss."""
    of_keras_2 = getattr(model, "compiled_loss", None)  # in Keras 3 a method, that is always there
    return getattr(model, "_compile_loss", None) is not None or not (of_keras_2 is None or inspect.ismethod(of_keras_2))


def rate_makers() -> list[tuple[Any, str]]:
    """Return (class, method) that gives a Keras 3 optimizer the learning rate of its step."""
    classes = _imported("BaseOptimizer", f"{KERAS_3}.optimizers.base_optimizer")
    return [(cls, "_get_current_learning_rate") for cls in classes]


def rate_of(optimizer: Any) -> Any:
    """Return the learning rate as the optimizer stores it: a variable, a schedule or a number; None without one."""
    return getattr(inner_optimizer(optimizer) or optimizer, "_learning_rate", None)


def steps_made(optimizer: Any) -> int:
    """Return how many steps an optimizer counts, including those of a restored run."""
    count = getattr(inner_optimizer(optimizer) or optimizer, "_iterations", None)
    return 0 if count is None or isinstance(count, int) else int(count.numpy())


def mirrored_metric_class() -> Any:
    """Return Keras 3's Metric class if all replicas share a metric's variables (up to Keras 3.9), else None."""
    shares = not hasattr(load("keras").Variable, "synchronization")
    return load(f"{KERAS_3}.metrics.metric").Metric if shares else None


def batchnorm_class(package: str) -> Any:
    """Return the class of an imported Keras with the arithmetic of BatchNormalization."""
    module = load(f"{package}.layers.normalization.batch_normalization")
    return module.BatchNormalization if package == KERAS_3 else module.BatchNormalizationBase


def is_synchronized(layer: Any, mask: Any) -> bool:
    """Return whether a BatchNormalization takes its statistics from all replicas; Keras 3.15 does not where there is a mask."""
    of_keras = KERAS_3 in {cls.__module__.partition(".layers")[0] for cls in type(layer).__mro__}
    return bool(getattr(layer, "synchronized", False)) and not (of_keras and mask is not None)


def replicas_summed(optimizer: Any) -> int:
    """Return over how many replicas gpudist_core has summed the gradients for an optimizer's own `apply`; 1 for none."""
    ours = sys.modules.get("gpudist_core.upstream.optimizers")
    context = tf.distribute.get_replica_context()
    if ours is None or context is None or not ours.is_summed(optimizer):
        return 1
    return int(context.num_replicas_in_sync)


def accumulated_by_core(optimizer: Any) -> dict[str, float]:
    """Return the option of an optimizer whose gradients gpudist_core accumulates in place of Keras, by its name."""
    ours = sys.modules.get("gpudist_core.upstream.optimizers")
    number = ours.accumulates(optimizer) if ours is not None else None
    return {"gradient_accumulation_steps": float(number)} if number else {}


def own_weights(layer: Any) -> list[Any]:
    """Return the trainable variables of a layer without those of its sub-layers."""
    return list(getattr(layer, "_trainable_variables", ())) or list(getattr(layer, "_trainable_weights", ()))


def policy_classes() -> list[Any]:
    """Return the dtype policies of the imported Keras versions: `_parse_name` gives compute and variable dtypes."""
    legacy = _imported("Policy", *(f"{package}.mixed_precision.policy" for package in LEGACY_KERAS))
    return legacy + _imported("DTypePolicy", f"{KERAS_3}.dtype_policies.dtype_policy")


def random_ops() -> list[tuple[Any, str, str]]:
    """Return (module, function, distribution) of the ops behind every draw of single numbers (TF 2.21)."""
    plain = load("tensorflow.python.ops.gen_random_ops")
    stateless = load("tensorflow.python.ops.gen_stateless_random_ops_v2")
    stateless_1 = load("tensorflow.python.ops.gen_stateless_random_ops")
    return [
        (plain, "random_uniform_int", "integer"),
        (plain, "multinomial", "categorical"),
        (stateless, "stateless_random_uniform_int_v2", "integer"),
        (stateless_1, "stateless_multinomial", "categorical"),
        (plain, "random_uniform", "uniform"),
        (plain, "random_standard_normal", "normal"),
        (plain, "truncated_normal", "truncated"),
        (stateless, "stateless_random_uniform_v2", "uniform"),
        (stateless, "stateless_random_normal_v2", "normal"),
        (stateless, "stateless_truncated_normal_v2", "truncated"),
        (plain, "random_gamma", "gamma"),
        (stateless, "stateless_random_gamma_v3", "gamma"),
        (plain, "random_poisson_v2", "poisson"),
        (stateless_1, "stateless_random_poisson", "poisson"),
        (stateless_1, "stateless_random_binomial", "binomial"),
        (load("tensorflow.python.ops.gen_stateful_random_ops"), "stateful_random_binomial", "binomial"),
    ]


def shuffles() -> list[tuple[Any, str]]:
    """Return (module, function) of the ops that shuffle the rows of a `value` (TF 2.21)."""
    stateless = load("tensorflow.python.ops.gen_stateless_random_ops_v2")
    return [(load("tensorflow.python.ops.gen_random_ops"), "random_shuffle"), (stateless, "stateless_shuffle")]


def candidate_samplers() -> list[tuple[Any, str]]:
    """Return (module, function) of the ops that draw classes for a whole batch, by a `seed` and a `seed2` (TF 2.21)."""
    module = load("tensorflow.python.ops.gen_candidate_sampling_ops")
    kinds = ("all", "fixed_unigram", "learned_unigram", "log_uniform", "thread_unsafe_unigram", "uniform")
    return [(module, f"{kind}_candidate_sampler") for kind in kinds]


def python_draws() -> list[tuple[Any, str, Any]]:
    """Return (module, function, maker of a generator by a seed) of each draw from the global generators of Python and NumPy."""
    import random

    import numpy as np

    makers = ((random, random.Random), (np.random, np.random.RandomState))
    every = [(module, name, maker) for module, maker in makers for name in {*dir(maker)} & {*vars(module)}]
    return [draw for draw in every if not (draw[1].startswith("_") or "seed" in draw[1] or "state" in draw[1])]


def local_copies(variable: Any) -> list[Any]:
    """Return the plain tf.Variables of a Keras 3, tf_keras or tf.distribute variable: one for each local replica."""
    inner = getattr(variable, "_value", None) if type(variable).__module__.startswith(KERAS_3) else variable
    if type(inner).__name__ == "AutoCastDistributedVariable" or hasattr(inner, "_variable"):
        inner = getattr(inner, "_variable", inner)
    copies = getattr(inner, "_values", None)
    return list(copies) if isinstance(copies, (list, tuple)) else [inner]


def tf_variable(variable: Any) -> Any:
    """Return the tf.Variable (or distributed variable) that a Keras 3 or auto-casting variable wraps."""
    if type(variable).__module__.startswith(KERAS_3):
        return getattr(variable, "_value", variable)
    return getattr(variable, "_variable", variable)


def variable_classes() -> list[Any]:
    """Return the classes that define how a variable is assigned: on one device, on several, on parameter devices (TF 2.21)."""
    from tensorflow.python.distribute import ps_values, values
    from tensorflow.python.ops import resource_variable_ops

    several = [values.DistributedVariable, values.SyncOnReadVariable, values.MirroredVariable, ps_values.AggregatingVariable]
    # TensorFlow gives the second one methods of its own, the first one's.
    return [resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable, *several]


PathOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def file_writers() -> list[tuple[Any, str, PathOf]]:
    """Return where TensorFlow writes files: owner, name, and a function for the path in the arguments (None if unknown)."""
    file_io = load("tensorflow.python.lib.io.file_io")
    summary = load("tensorflow.python.ops.gen_summary_ops")
    return [
        (file_io.FileIO, "_prewrite_check", lambda args, _: args[0].name),
        (file_io, "rename_v2", lambda args, kwargs: _argument(args, kwargs, 1, "dst")),
        (summary, "create_summary_file_writer", lambda args, kwargs: _text_of(_argument(args, kwargs, 1, "logdir"))),
    ]


def checkpoint_writer() -> tuple[Any, str, PathOf]:
    """Return what writes every TensorFlow checkpoint, in the same form."""
    saver = load("tensorflow.python.checkpoint.functional_saver").MultiDeviceSaver
    return saver, "save", lambda args, kwargs: _text_of(_argument(args, kwargs, 1, "file_prefix"))


def merge_of_checkpoint() -> tuple[Any, str]:
    """Return the operation that merges the parts of a checkpoint: module and name."""
    return load("tensorflow.python.ops.gen_io_ops"), "merge_v2_checkpoints"


def keras_savers() -> list[tuple[Any, str]]:
    """Return what closes the file of weights while Keras 3 saves."""
    return [(cls, "close") for cls in _imported("H5IOStore", f"{KERAS_3}.saving.saving_lib")]


def file_readers() -> list[tuple[Any, str, PathOf]]:
    """Return where TensorFlow reads files and checkpoints, in the same form."""
    file_io = load("tensorflow.python.lib.io.file_io")
    checkpoints = load("tensorflow.python.training.py_checkpoint_reader")
    return [
        (file_io.FileIO, "_preread_check", lambda args, _: None if args[0]._read_buf else args[0].name),
        (checkpoints, "NewCheckpointReader", lambda args, kwargs: _text_of(_argument(args, kwargs, 0, "filepattern"))),
    ]


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _text_of(path: Any) -> Any:
    """Return a path that may be an eager tensor; None for one that only the graph knows."""
    value = getattr(path, "numpy", None)
    return path if value is None else value()


def constant_maker() -> tuple[Any, str]:
    """Return where every constant of a graph is made: module and name (TF 2.21)."""
    return load("tensorflow.python.framework.ops"), "_create_graph_constant"


def is_library(file: str) -> bool:
    """Return whether a file is TensorFlow's, Keras's or ours: a finding is located at a line of the user."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return file.startswith(tuple(os.path.dirname(str(module.__file__)) + os.sep for module in modules))


_LIBRARIES = ("tensorflow", "keras", "tf_keras", "emulate", "gpudist_core")


def distributed_dataset_classes() -> list[Any]:
    """Return the classes of what a strategy makes of datasets (TF 2.21)."""
    module = load("tensorflow.python.distribute.input_lib")
    return [module.DistributedDataset, module.DistributedDatasetsFromFunction]


def distribution_of(dataset: Any) -> tuple[int, Any, Any]:
    """Return the cardinality, the strategy and the global dataset of a distributed one; None as dataset of a function's."""
    return int(dataset._cardinality), dataset._strategy, getattr(dataset, "_original_dataset", None)


def partial_batch(adapter: Any) -> int | None:
    """Return how many examples the last batch of `fit`'s data has, None where it is full or Keras does not know.

    The adapters of a PyDataset and of a generator leave the question to their base class, which raises.
    """
    try:
        return adapter.partial_batch_size  # type: ignore[no-any-return]
    except NotImplementedError:
        return None


def reads_generator(iterator: Any) -> bool:
    """Return whether the data of `fit` are distributed and come from a Python generator (Keras 3.15)."""
    is_distributed = isinstance(iterator._distributed_dataset, tuple(distributed_dataset_classes()))
    return is_distributed and type(iterator.data_adapter).__name__ == "GeneratorDataAdapter"


def surprising_classes() -> tuple[Any, Any]:
    """Return the class of Keras 3's layers that add, multiply or average their inputs, and that of the data of `fit`."""
    return load(f"{KERAS_3}.layers.merging.base_merge").Merge, load(f"{KERAS_3}.backend.tensorflow.trainer").TFEpochIterator


def last_batch(dataset: Any) -> int | None:
    """Return how many examples the last batch has, where it is smaller than the others and this can be told."""
    while type(dataset).__name__ not in ("_BatchDataset", "_ParallelBatchDataset"):
        inputs = dataset._inputs()
        if len(inputs) != 1 or int(inputs[0].cardinality()) != int(dataset.cardinality()):
            return None
        (dataset,) = inputs
    examples = int(dataset._inputs()[0].cardinality())
    rest = 0 if examples < 0 or bool(dataset._drop_remainder) else examples % int(dataset._batch_size)
    return rest or None


_DRAWS = {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"}
"""Operations that draw from a generator of their own, which their seeds start."""
_STATELESS = ("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", "StatelessShuffle")
"""Operations that draw from the seed that they are given."""


FIRST_NUMBER = "_gpudist_first_number"
"""Attribute of a dataset with the first number of its `enumerate`."""


def random_stages(dataset: Any) -> list[str]:
    """Return the stages of a pipeline that draw random numbers in each epoch: `shuffle`, or a function that draws."""
    stages = [what for source in dataset._inputs() for what in random_stages(source)]
    if type(dataset).__name__ == "_ShuffleDataset" and getattr(dataset, "_reshuffle_each_iteration", None) is not False:
        stages.append("shuffle")
    stage = drawing_stage(dataset)
    return stages if stage is None or not stage["seeds"] else [*stages, stage["stage"]]


def drawing_stage(dataset: Any) -> dict[str, Any] | None:
    """Return the stage of a dataset whose own functions draw, or None.

    Args:
        dataset: A `tf.data.Dataset`.

    Returns:
        Its name; the seeds of what draws from a generator; where all draws come from the function's arguments alone, a
        digest of the function, else nothing.
    """
    for function, graph in functions_of(dataset):
        if inspect.isfunction(function) and function.__module__.startswith((KERAS_3, *LEGACY_KERAS)):
            continue  # `fit` draws the order of arrays so, not numbers for examples
        operations = graph.get_operations()
        seeds = [[op.get_attr("seed"), op.get_attr("seed2")] for op in operations if op.type in _DRAWS]
        pure = not seeds and not graph.captures and any(op.type.startswith(_STATELESS) for op in operations)
        if seeds or pure:
            name = f"map({getattr(function, '__name__', 'a function')})"
            return {"stage": name, "seeds": seeds, "function": _digest_of(graph, dataset) if pure else ""}
    return None


def functions_of(dataset: Any) -> list[tuple[Any, Any]]:
    """Return the functions of a dataset's own stage, as the program wrote them, with their graphs."""
    return [(function._func, function.function.graph) for function in dataset._functions()]


def _digest_of(graph: Any, dataset: Any) -> str:
    """Return a digest of a function and of its first input number: `Dataset.enumerate` may start elsewhere on each host."""
    state = hashlib.blake2b(graph.as_graph_def().SerializeToString(deterministic=True), digest_size=8)
    waiting = list(dataset._inputs())
    while waiting:
        stage = waiting.pop()
        waiting += stage._inputs()
        state.update(str(getattr(stage, FIRST_NUMBER, "")).encode())
    return state.hexdigest()


def stack() -> list[tuple[str, int]]:
    """Return (file, line) of each call on this thread, outermost first, through autograph's map of its code (TF 2.21)."""
    if "tensorflow" not in sys.modules:
        return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()]
    return [(frame.filename, frame.lineno) for frame in load("tensorflow.python.util.tf_stack").extract_stack()]


def converter() -> tuple[Any, str]:
    """Return where autograph converts a function: module and name. The result has `ag_source_map` (TF 2.21)."""
    return load("tensorflow.python.autograph.impl.api"), "_convert_actual"


def origins_of(converted: Any) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Yield each line of a converted function with the line that it was made of."""
    for place, origin in getattr(converted, "ag_source_map", {}).items():
        yield (place.filename, place.lineno), (origin.loc.filename, origin.loc.lineno)


def is_function(graph: Any, name: str) -> bool:
    """Return whether a type of operations is the name of a function that they call (TF 2.21)."""
    return bool(graph._is_function(name))


def body_of(graph: Any, name: str) -> Any:
    """Return the graph of a function that operations of a graph call (`Graph._functions`, TF 2.21)."""
    function = graph._functions[name]
    body = getattr(function, "graph", None)
    if body is None:  # made by Defun, as in the loops of tf.nn.ctc_loss: the definition alone is left
        with graph.as_default():
            graphs = load("tensorflow.python.framework.function_def_to_graph")
            body = graphs.function_def_to_graph(function.definition, include_library_functions=True)
    return body


def replica_collectives() -> list[tuple[Any, str]]:
    """(class, method) of what replicas put their values together with (TF 2.21)."""
    lib = load("tensorflow.python.distribute.distribute_lib")
    return [(lib.ReplicaContextBase, "all_reduce"), (lib.ReplicaContext, "all_gather")]


def layer_classes_of(package: str) -> list[Any]:
    """Return the Layer class of an imported Keras version."""
    return _imported("Layer", *(name for name in KERAS_LAYERS if name.startswith(f"{package}.")))


def tensor_number(tensor: Any) -> int | None:
    """Return an eager tensor's number, which no other has; None for anything else."""
    number = getattr(tensor, "_id", None)
    return number if isinstance(number, int) else None


@contextlib.contextmanager
def watching_operations(see: Callable[..., None]) -> Iterator[None]:
    """Call `see` with each operation that this thread runs in eager code (TF 2.21).

    MirroredStrategy gives the threads of its replicas the one list of callbacks of the thread that calls it (2.21,
    mirrored_run.py), so a callback is called by the other replicas, too, and by what adds up over them.
    """
    callbacks, own = load("tensorflow.python.framework.op_callbacks"), threading.get_ident()

    def see_own(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == own:
            see(*args, **kwargs)

    callbacks.add_op_callback(see_own)
    try:
        yield
    finally:
        callbacks.remove_op_callback(see_own)


def run_independently(operation: Any) -> None:
    """Keep a tf.function from ordering this operation after all others with side effects, those of other replicas included."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


class Names:
    """Give every variable a stable, unique name: its path in the model, numbered if two share one."""

    def __init__(self) -> None:
        self._by_id: dict[int, str] = {}
        self._taken: dict[str, int] = {}
        self._kept: list[Any] = []

    def of(self, variable: Any) -> str:
        """Return the variable's name, the same for each call."""
        inner = tf_variable(variable)
        key = id(variable if inner is None else inner)  # one that Keras has not made yet has none
        if key not in self._by_id:
            self._by_id[key] = self._new(_path(variable))
            self._kept += [variable, inner]
        return self._by_id[key]

    def _new(self, path: str) -> str:
        count = self._taken.get(path, 0) + 1
        self._taken[path] = count
        return path if count == 1 else f"{path}#{count}"


def _path(variable: Any) -> str:
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    if path == type(variable).__name__:  # an optimizer by its default name: SGD in Keras 2 and 3.12 (for Python 3.10), else sgd
        path = path.lower()
    return str(path).removesuffix(":0")


def read_local(variable: Any) -> Any:
    """Return a tensor with the value for the current replica (the first copy outside of replicas)."""
    return tf_variable(variable).read_value()


def copy_of(variable: Any, local: int) -> Any:
    """Return the plain tf.Variable that a local replica uses."""
    copies = local_copies(variable)
    return copies[local % len(copies)]


def static_int(value: Any) -> int:
    """Return a replica's number: a constant in every strategy of one or several hosts."""
    static = tf.get_static_value(value)
    return int(static) if static is not None else 0


def is_floating(variable: Any) -> bool:
    """Return whether a variable or tensor holds numbers that training changes. Keras names dtypes by strings."""
    dtype = getattr(variable, "dtype", None)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", "")
    return name.startswith(("float", "bfloat"))


_of_metrics: list[Any] = []


def mark_of_metric(variable: Any) -> None:
    """Note that a Keras variable belongs to a metric. Within a `tf.function` its tf.Variable is only made later."""
    _of_metrics.append(variable)


def is_of_metric(variable: Any) -> bool:
    """Return whether a tf.Variable belongs to a metric (`mark_of_metric`)."""
    return any(tf_variable(other) is variable for other in _of_metrics)


def is_count_of_each(variable: Any) -> bool:
    """Return whether each replica keeps its own count, added up on read: the state of a metric in a Keras 2 model."""
    if is_of_metric(tf_variable(variable)):
        return True
    if getattr(variable, "synchronization", None) != tf.VariableSynchronization.ON_READ:
        return False
    return bool(variable.aggregation == tf.VariableAggregation.SUM)
