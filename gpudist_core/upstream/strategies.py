"""Support strategies whose variables are not mirrored, and static tensors (TensorFlow 2.21, Keras 3.15).

Work is sent to the workers of parameter servers. A worker may die and its work be repeated, and several workers process one
batch. So a random seed is only read there, and never advanced. A large variable is in parts.

Under CentralStorageStrategy one variable serves all replicas. TensorFlow aggregates their assignments to it
(`AggregatingVariable`). Keras expects a variable for each replica. Metrics count with `total.assign(total + mine)`, which
becomes N times the old total. BatchNormalization, Nadam and LossScaleOptimizer assign without an aggregation, which TensorFlow
refuses.

Static tensors need variables of one device, and of each device's own values, in the scope of any strategy.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.state import PerThread
from gpudist_core.upstream import patches, runtime
from gpudist_core.upstream.models import plain

_seeds: PerThread[Seeds | None] = PerThread(None)
CALLS_PER_ITEM = 4096


class Seeds:
    """Compute the seeds of one traced function: a generator's n-th draw is n steps after its state.

    Args:
        item: Number of work items since the states were last advanced: an int64 scalar tensor.

    Attributes:
        draws: The number of draws from each generator, by the generator's id, with the generator.
    """

    def __init__(self, item: Any) -> None:
        self._item = item
        self.draws: dict[int, tuple[Any, int]] = {}

    def next(self, generator: Any) -> Any:
        """Return the next seed of a generator without changing its state."""
        _, count = self.draws.get(id(generator), (generator, 0))
        self.draws[id(generator)] = (generator, count + 1)
        state = tf.convert_to_tensor(generator.state)
        further = tf.stack([tf.zeros([], tf.int64), self._item * CALLS_PER_ITEM + count])
        return state + tf.cast(further, state.dtype)


@contextlib.contextmanager
def reading_seeds(item: Any) -> Iterator[Seeds]:
    """Read Keras's seed generators, without advancing them, while this thread traces.

    Args:
        item: As for `Seeds`.

    Yields:
        The seeds that were read.
    """
    seeds = Seeds(item)
    with patches.of_step, _seeds.set(seeds):
        yield seeds


def advance_seeds(draws: dict[int, tuple[Any, int]], items: int | None = None) -> None:
    """Advance the states of generators as if the work had done it.

    Args:
        draws: The draws of a `Seeds`.
        items: Number of finished items; None for one batch, which advances as on one device.
    """
    for generator, count in draws.values():
        value = generator.state.value
        step = count if items is None else items * CALLS_PER_ITEM
        value.assign(tf.convert_to_tensor(value) + tf.cast([0, step], value.dtype))


def replacements() -> patches.Replacements:
    """Return what lets Keras's seed generators be read without advancing them, and replicas assign to a variable they share."""
    import keras

    yield from _of_variables()
    yield keras.random.SeedGenerator, "next", _reading


def _reading(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    seeds = _seeds.value
    return original(self, ordered) if seeds is None else seeds.next(self)


def parts_of(variable: Any) -> list[Any]:
    """Return the variables that a variable is partitioned into, or the variable itself.

    Args:
        variable: A Keras variable or a `tf.Variable`, perhaps a ShardedVariable from the strategy's partitioner.

    Returns:
        The parts, in order.
    """
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    whole = plain(variable)
    return list(whole.variables) if isinstance(whole, ShardedVariable) else [variable]


def let_be_read(model: Any) -> None:
    """Let a model's partitioned variables be read as arrays, as `get_weights` and `save_weights` do.

    Args:
        model: A Keras model. Its variables get the method that TensorFlow's `ShardedVariable` lacks.
    """
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    for variable in map(plain, getattr(model, "variables", [])):
        if isinstance(variable, ShardedVariable) and not hasattr(variable, "__array__"):
            # Keras (3.8 to 3.15) reads weights with `np.array(variable)` outside of steps, where nothing is replaced.
            variable.__array__ = functools.partial(_read, weakref.ref(variable))


def _read(variable: Any, dtype: Any = None, copy: Any = None) -> Any:
    return np.asarray(tf.convert_to_tensor(variable()), dtype)


def is_coordinated(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy is a `ParameterServerStrategy` that works with a ClusterCoordinator."""
    return isinstance(strategy, (tf.distribute.ParameterServerStrategy, tf.distribute.experimental.ParameterServerStrategy))


def num_tasks(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Return the numbers of workers and of parameter servers of a `ParameterServerStrategy`."""
    return int(strategy._num_workers), int(strategy._num_ps)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the TensorFlow variables that a Keras optimizer was built with."""
    return [plain(variable) for variable in optimizer._trainable_variables]


def is_central(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy keeps one variable for several replicas."""
    return "CentralStorage" in type(strategy).__name__ and strategy.num_replicas_in_sync > 1


def is_shared(variable: Any) -> bool:
    """Return whether all replicas read one variable, which holds what all of them have added.

    Args:
        variable: A Keras or TensorFlow variable.

    Returns:
        True under CentralStorageStrategy with several replicas.
    """
    return type(plain(variable)).__name__ == "AggregatingVariable"


def _of_variables() -> patches.Replacements:
    from keras.src import backend
    from tensorflow.python.distribute.ps_values import AggregatingVariable

    yield backend.Variable, "_direct_assign", _adding
    for name in ("assign", "assign_add", "assign_sub"):
        yield AggregatingVariable, name, _of_first_replica


def _is_of_replica(variable: Any, aggregation: tf.VariableAggregation) -> bool:
    """Return whether a replica assigns to a shared variable with this aggregation."""
    is_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return is_replica and is_shared(variable) and plain(variable).aggregation == aggregation


def _adding(original: Callable[..., Any], self: Any, value: Any) -> Any:
    """Let what the replicas assign to a variable of a metric be added up."""
    if shares.current() is None or not _is_of_replica(self, tf.VariableAggregation.SUM):
        return original(self, value)
    kept = plain(self)
    return kept.assign_add(tf.cast(value, kept.dtype) - kept.read_value())


def _of_first_replica(original: Callable[..., Any], self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the first replica's value count if a variable has no aggregation. The values are equal on all replicas.

    LossScaleOptimizer updates in further threads, in which no share is set. So this depends on the variable alone. The original
    only raises there: no program that works without gpudist_core changes.
    """
    if not _is_of_replica(self, tf.VariableAggregation.NONE):
        return original(self, value, *args, **kwargs)

    def update(kept: Any, value: Any) -> Any:
        return getattr(kept, original.__name__)(value, *args, **kwargs)

    def of_first(strategy: tf.distribute.Strategy, values: Any) -> Any:
        return strategy.extended.update(self, update, args=(strategy.experimental_local_results(values)[0],))

    context = tf.distribute.get_replica_context()
    try:  # all replicas have read the variable before it changes
        return context.merge_call(of_first, args=(value,))
    except RuntimeError as error:
        if "called while defining a new graph" not in str(error):
            raise
    # LossScaleOptimizer assigns its own variables in a `cond`, where replicas cannot wait for each other. The public
    # `replica_id_in_sync_group` is a tensor there (TensorFlow 2.21).
    return update(self.get(), value) if context._replica_id_in_sync_group == 0 else self.read_value()


ALIGNMENT = 64
"""The alignment in bytes at which TensorFlow's kernels use memory without a copy."""


def plain_variable(initial_value: Any, *, device: str, name: str) -> Any:
    """Return a `tf.Variable` on one device, even inside a strategy's scope (which would make a distributed one).

    Args:
        initial_value: A callable without arguments that returns the initial value.
        device: The device's full name.
        name: The variable's name.

    Returns:
        The variable; it is not trainable.
    """
    with tf.init_scope(), tf.variable_creator_scope(lambda next_creator, **kwargs: _create(**kwargs)), tf.device(device):
        return tf.Variable(initial_value, trainable=False, name=name)


def _create(**kwargs: Any) -> Any:
    from tensorflow.python.ops.variables import default_variable_creator_v2

    return default_variable_creator_v2(None, **kwargs)


def zeros_to_own(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a tensor of zeros in NumPy's memory on a CPU. A variable made from it uses the memory without a copy.

    TensorFlow updates a variable in place if the variable owns its buffer. A tensor over foreign memory does not own it, so the
    first update would copy all of it. A slice of such a tensor counts as owner (TensorFlow 2.21).

    Args:
        shape: The shape; its size is not 0.
        dtype: An integer or floating dtype.

    Returns:
        The tensor. Nothing else refers to its memory, and none of its pages was touched yet.
    """
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.zeros((count + 1) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    flat = raw[start : start + (count + 1) * dtype.itemsize].view(dtype)
    with tf.device("CPU:0"):
        return tf.reshape(tf.experimental.dlpack.from_dlpack(flat.__dlpack__())[:count], shape)


def unmirrored(strategy: tf.distribute.Strategy, initial_value: Callable[[str], Any]) -> Any:
    """Return a context in which a mirrored strategy's variables are made from each device's own initial value.

    The strategy itself would broadcast the first host's values over the network, which needs as much memory again (512 MiB of
    slices on each of two hosts: 1.1 GiB), and would let all devices of a host start from one buffer.

    Args:
        strategy: The strategy in whose scope a variable is about to be made.
        initial_value: A function that makes the value, called on each device with its name.

    Returns:
        The context manager, to be entered inside the strategy's scope.
    """
    from tensorflow.python.distribute import distribute_utils as distribute

    devices = strategy.extended.worker_devices

    def mirrored(next_creator: Any, **kwargs: Any) -> Any:
        return distribute.create_mirrored_variable(
            strategy, copies, distribute.VARIABLE_CLASS_MAPPING, distribute.VARIABLE_POLICY_MAPPING, **kwargs
        )

    def copies(**kwargs: Any) -> list[Any]:
        name = kwargs.pop("name", None) or "Variable"
        variables: list[Any] = []
        for i, device in enumerate(devices):
            with tf.device(device):
                new_name = f"{variables[0].name.split(':')[0]}/replica_{i}/" if variables else name
                variables.append(
                    _create(**{**kwargs, "name": new_name, "initial_value": functools.partial(initial_value, device)})
                )
        return variables

    return tf.variable_creator_scope(mirrored)


def is_in_dataset_function() -> bool:
    """Return whether the function of a `tf.data` transformation is being traced: it runs on the host."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # structured_function.py names its graphs after the transformation: Dataset_map_<function>, Dataset_filter_<function>.
        if str(getattr(graph, "name", "")).startswith("Dataset_"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def is_symbolic() -> bool:
    """Return whether Keras traces a model for its shapes only, outside of every replica."""
    module = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return module is not None and bool(module.in_symbolic_scope())


def memory_limits() -> dict[str, int]:
    """Return the bytes that TensorFlow may use of each accelerator of this process, by the short device name (`GPU:0`)."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session as session

    context = runtime.eager_context()
    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context._handle)
    return {
        session.TF_DeviceListName(devices, i).rpartition("/device:")[2]: int(session.TF_DeviceListMemoryBytes(devices, i))
        for i in range(session.TF_DeviceListCount(devices))
        if session.TF_DeviceListType(devices, i) != "CPU"
    }
