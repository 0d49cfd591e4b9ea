"""Collect the private names of TensorFlow for the emulated devices. tests/emulate/devices/test_upstream.py tests each.

Names are looked up when they are used: importing this file imports no TensorFlow.
"""

from __future__ import annotations

import sys
from typing import Any


def context() -> Any:
    """Return the eager context, without initializing it."""
    from tensorflow.python.eager import context as module

    return module.context()


def is_initialized() -> bool:
    """Return whether TensorFlow's runtime has started, after which devices cannot change."""
    return bool(context()._initialized)


def context_class() -> Any:
    """Return the class whose `device` implements every eager `tf.device`."""
    from tensorflow.python.eager import context as module

    return module.Context


def graph_class() -> Any:
    """Return the class whose `device` implements every `tf.device` in a graph."""
    from tensorflow.python.framework import ops

    return ops.Graph


def function_graph_class() -> Any:
    """Return the class of a tf.function's graph, whose `capture_call_time_value` gives collectives their keys."""
    from tensorflow.python.framework import func_graph

    return func_graph.FuncGraph


def concrete_function_class() -> Any:
    """Return the class of one trace of a tf.function; `_call_flat` calls it, also in a graph under construction."""
    from tensorflow.python.eager.polymorphic_function import concrete_function

    return concrete_function.ConcreteFunction


def function_being_built() -> Any:
    """Return the graph of the function under construction (also of a branch or a loop's body); None outside of functions."""
    from tensorflow.python.framework import ops

    graph = ops.get_default_graph()
    return graph if graph.building_function else None


def reduced_values(values: Any) -> list[Any]:
    """Return the values given to a cross-device operation: a value of each replica, or pairs of values and destinations."""
    from tensorflow.python.distribute import values as lib

    given = [pair[0] for pair in values] if isinstance(values, list | tuple) else [values]
    return [value.values[0] if isinstance(value, lib.DistributedValues) else value for value in given]


def device_util() -> Any:
    """Return the module with which strategies complete device names."""
    from tensorflow.python.distribute import device_util as module

    return module


def dataset_class() -> Any:
    """Return the class of every dataset; each iterator first calls its `_apply_debug_options`."""
    from tensorflow.python.data.ops import dataset_ops

    return dataset_ops.DatasetV2


def prefetching() -> Any:
    """Return the module behind `tf.data.experimental.prefetch_to_device`."""
    from tensorflow.python.data.experimental.ops import prefetching_ops

    return prefetching_ops


def data_modules() -> list[Any]:
    """Return each loaded public spelling of `tf.data.experimental`."""
    return [
        m
        for name, m in list(sys.modules.items())
        if name.startswith("tensorflow._api.") and name.endswith(".data.experimental")
    ]


def mirrored_extended() -> Any:
    """Return the base of both MirroredStrategy classes (TF 1 and 2)."""
    from tensorflow.python.distribute import mirrored_strategy

    return mirrored_strategy.MirroredExtended


def collective_extended() -> Any:
    """Return the base of every MultiWorkerMirroredStrategy class."""
    from tensorflow.python.distribute import collective_all_reduce_strategy

    return collective_all_reduce_strategy.CollectiveAllReduceExtended


def central_extended() -> Any:
    """Return the base of CentralStorageStrategy and TF 1's ParameterServerStrategy."""
    from tensorflow.python.distribute import parameter_server_strategy

    return parameter_server_strategy.ParameterServerStrategyExtended


def communication_options() -> Any:
    """Return the class behind `tf.distribute.experimental.CommunicationOptions`."""
    from tensorflow.python.distribute import collective_util

    return collective_util.Options


def cross_device_ops() -> Any:
    """Return the module with the operations that sum over devices."""
    from tensorflow.python.distribute import cross_device_ops as module

    return module


def replica_launcher_class() -> Any:
    """Return the class that starts the collectives of one replica."""
    from tensorflow.python.distribute import cross_device_utils

    return cross_device_utils.CollectiveReplicaLauncher


def server_class() -> Any:
    """Return the class of `tf.distribute.Server` and TF 1's `tf.train.Server`."""
    from tensorflow.python.training import server_lib

    return server_lib.Server


def device_lib() -> Any:
    """Return `tensorflow.python.client.device_lib`, which many programs call although it is private."""
    from tensorflow.python.client import device_lib as module

    return module


def device_attributes() -> Any:
    """Return the message class that `device_lib.list_local_devices` lists."""
    from tensorflow.core.framework import device_attributes_pb2

    return device_attributes_pb2.DeviceAttributes


def public_modules() -> list[Any]:
    """Return each loaded public module of TensorFlow that lists devices, in TF 1 and TF 2 spellings."""
    return _public((".config", ".config.experimental", ".test"))


def _public(ends: tuple[str, ...]) -> list[Any]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("tensorflow._api.") and name.endswith(ends)]


def defining_modules() -> list[Any]:
    """Return the modules that define those functions."""
    from tensorflow.python.framework import config, test_util
    from tensorflow.python.platform import test

    return [config, test_util, test, device_lib()]
