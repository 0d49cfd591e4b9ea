"""Collect the private names of TensorFlow for the emulated devices. tests/emulate/devices/test_upstream.py tests each.

Names are looked up when they are used: importing this file imports no TensorFlow.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from emulate.graph_functions import load
from emulate.imports import Later

ops: Any = Later("tensorflow.python.framework.ops")
resource_variable_ops: Any = Later("tensorflow.python.ops.resource_variable_ops")
atomic_function: Any = Later("tensorflow.python.eager.polymorphic_function.atomic_function")

# Private names, looked up when they are called: importing this file imports no TensorFlow.
# The class whose `device` implements every eager `tf.device`.
context_class = partial(load, "tensorflow.python.eager.context", "Context")
# The class whose `device` implements every `tf.device` in a graph.
graph_class = partial(load, "tensorflow.python.framework.ops", "Graph")
# The class of one trace of a tf.function; `_call_flat` calls it, also in a graph under construction.
concrete_function_class = partial(load, "tensorflow.python.eager.polymorphic_function.concrete_function", "ConcreteFunction")
# The module with which strategies complete device names.
device_util = partial(load, "tensorflow.python.distribute.device_util")
# The module behind `tf.data.experimental.prefetch_to_device`.
prefetching = partial(load, "tensorflow.python.data.experimental.ops.prefetching_ops")
# The base of both MirroredStrategy classes (TF 1 and 2).
mirrored_extended = partial(load, "tensorflow.python.distribute.mirrored_strategy", "MirroredExtended")
# The base of every MultiWorkerMirroredStrategy class.
collective_extended = partial(
    load, "tensorflow.python.distribute.collective_all_reduce_strategy", "CollectiveAllReduceExtended"
)
# The base of CentralStorageStrategy and TF 1's ParameterServerStrategy.
central_extended = partial(load, "tensorflow.python.distribute.parameter_server_strategy", "ParameterServerStrategyExtended")
# The class behind `tf.distribute.experimental.CommunicationOptions`.
communication_options = partial(load, "tensorflow.python.distribute.collective_util", "Options")
# The module with the operations that sum over devices.
cross_device_ops = partial(load, "tensorflow.python.distribute.cross_device_ops")
# The class of `tf.distribute.Server` and TF 1's `tf.train.Server`.
server_class = partial(load, "tensorflow.python.training.server_lib", "Server")
# `tensorflow.python.client.device_lib`, which many programs call although it is private.
device_lib = partial(load, "tensorflow.python.client.device_lib")
# The message class that `device_lib.list_local_devices` lists.
device_attributes = partial(load, "tensorflow.core.framework.device_attributes_pb2", "DeviceAttributes")
distributed_values = partial(load, "tensorflow.python.distribute.values")  # the module with `PerReplica` and `Mirrored`
# The module that deals values out to replicas and puts theirs together.
distribute_utils = partial(load, "tensorflow.python.distribute.distribute_utils")
# The iterator that deals a dataset's elements out to several devices.
multi_device_iterator = partial(load, "tensorflow.python.data.ops.multi_device_iterator_ops", "OwnedMultiDeviceIterator")
mirrored_run = partial(load, "tensorflow.python.distribute.mirrored_run")  # the module behind `MirroredStrategy.run`
input_lib = partial(load, "tensorflow.python.distribute.input_lib")  # the module that deals out data
# The module that copies datasets for several devices.
data_distribution = partial(load, "tensorflow.python.data.experimental.ops.distribute")
# The class that reads a cluster from TF_CONFIG.
config_resolver = partial(
    load, "tensorflow.python.distribute.cluster_resolver.tfconfig_cluster_resolver", "TFConfigClusterResolver"
)


def context() -> Any:
    """Return the eager context, without initializing it."""
    return load("tensorflow.python.eager.context").context()


def is_initialized() -> bool:
    """Return whether TensorFlow's runtime has started, after which devices cannot change."""
    return bool(context()._initialized)


def function_being_built() -> Any:
    """Return the graph of the function under construction (also of a branch or a loop's body); None outside of functions."""
    graph = ops.get_default_graph()
    return graph if graph.building_function else None


def reduced_values(values: Any) -> list[Any]:
    """Return the values given to a cross-device operation: a value of each replica, or pairs of values and destinations."""
    from tensorflow.python.distribute import values as lib

    given = [pair[0] for pair in values] if isinstance(values, list | tuple) else [values]
    return [value.values[0] if isinstance(value, lib.DistributedValues) else value for value in given]


def _loaded(*ends: str) -> list[Any]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("tensorflow._api.") and name.endswith(ends)]


data_modules = partial(_loaded, ".data.experimental")  # each loaded public spelling of `tf.data.experimental`
# Each loaded public module of TensorFlow that lists devices, in TF 1 and TF 2 spellings.
public_modules = partial(_loaded, ".config", ".config.experimental", ".test")


def defining_modules() -> list[Any]:
    """Return the modules that define those functions."""
    from tensorflow.python.framework import config, test_util
    from tensorflow.python.platform import test

    return [config, test_util, test, device_lib()]


def replica_thread(strategy: Any, fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the thread in which TensorFlow calls the first replica's function, and what ends it."""
    from tensorflow.python.distribute import shared_variable_creator
    from tensorflow.python.training import coordinator

    run = mirrored_run()
    stops = coordinator.Coordinator(clean_stop_exception_types=(run._RequestedStop,))
    thread = run._MirroredReplicaThread(
        strategy,
        stops,
        0,
        strategy.extended.worker_devices,
        shared_variable_creator.make_fn({}, 0),
        fn,
        distribute_utils().caching_scope_local,
        args,
        kwargs,
        run._get_thread_local_configuration_callable(),
    )
    return stops, thread


def eager_mode() -> Any:
    """Return the context in which operations run at once."""
    return load("tensorflow.python.eager.context").eager_mode()


def function_graph(name: str) -> Any:
    """Return an empty graph of a function that is called in the graph under construction."""
    return load("tensorflow.python.framework.func_graph").FuncGraph(name)


def automatic_control_dependencies() -> Any:
    """Return what lets the operations of a function's graph run in the program's order."""
    return load("tensorflow.python.framework.auto_control_deps").AutomaticControlDependencies()


def copy_handle_data(source: Any, target: Any) -> None:
    """Let a tensor refer to what another one refers to, as far as its shape is concerned."""
    from tensorflow.python.ops import handle_data_util

    handle_data_util.copy_handle_data(source, target)


def read_unread(value: Any) -> Any:
    """Return the value of a variable that an assignment has returned; anything else as it is."""
    return ops.convert_to_tensor(value) if isinstance(value, resource_variable_ops._UnreadVariable) else value


def read_copy(value: Any) -> Any:
    """Return the value of a plain variable; anything else, also a variable of several replicas, as it is."""
    return ops.convert_to_tensor(value) if isinstance(value, resource_variable_ops.BaseResourceVariable) else value


def take_functions(graph: Any, other: Any) -> None:
    """Let a graph call the functions that another one calls."""
    for function in other._functions.values():
        graph._add_function_recursive(function)


def add_function(outer: Any, graph: Any, *, keeps_apart: bool = False) -> Any:
    """Make a function of a graph, and let another graph call it.

    Args:
        outer: The graph that calls it.
        graph: What it does, with inputs, outputs and control outputs.
        keeps_apart: Whether it stays one function, compiled once, however often it is called.

    Returns:
        The function.
    """
    attributes = {"_noinline": True} if keeps_apart else {}
    function = atomic_function.from_func_graph(f"{graph.name}_{ops.uid()}", graph, attributes)
    outer._add_function_recursive(function)
    return function


def call_function(function: Any, given: list[Any], like: list[Any]) -> tuple[Any, list[Any]]:
    """Call a function in the graph under construction; return the operation, and its results with dtypes and shapes."""
    dtypes = [tensor.dtype.as_datatype_enum for tensor in like]
    operation = atomic_function.partitioned_call_op(function.name, given, True, dtypes)
    for output, other in zip(operation.outputs, like, strict=True):
        output.set_shape(other.shape)
        copy_handle_data(other, output)
    return operation, list(operation.outputs)


def input_workers(devices: Any) -> Any:
    """Return the devices of each host, for what deals out its data."""
    return input_lib().InputWorkers(devices)
