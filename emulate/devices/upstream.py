"""Every private name of TensorFlow that the emulated devices rest on; tests/emulate/devices/test_upstream.py guards each.

Names are looked up when they are used: importing this file imports no TensorFlow.
"""

from __future__ import annotations

import sys
from typing import Any


def context() -> Any:
    """The eager context, which is not initialised by asking for it."""
    from tensorflow.python.eager import context as module

    return module.context()


def is_initialized() -> bool:
    """Whether TensorFlow's runtime is up, after which devices cannot change."""
    return bool(context()._initialized)


def context_class() -> Any:
    """The class whose `device` every eager `tf.device` ends in."""
    from tensorflow.python.eager import context as module

    return module.Context


def graph_class() -> Any:
    """The class whose `device` every `tf.device` in a graph ends in."""
    from tensorflow.python.framework import ops

    return ops.Graph


def function_graph_class() -> Any:
    """The graph of a tf.function, whose `capture_call_time_value` hands collectives their keys."""
    from tensorflow.python.framework import func_graph

    return func_graph.FuncGraph


def concrete_function_class() -> Any:
    """One trace of a tf.function; `_call_flat` calls it, in a graph that is being built too."""
    from tensorflow.python.eager.polymorphic_function import concrete_function

    return concrete_function.ConcreteFunction


def function_being_built() -> Any:
    """The graph of the function that is being traced, a branch or a loop's body for one; None outside of functions."""
    from tensorflow.python.framework import ops

    graph = ops.get_default_graph()
    return graph if graph.building_function else None


def reduced_values(values: Any) -> list[Any]:
    """What a cross-device operation is given: a value of each replica, or pairs of those with where their sums are to be."""
    from tensorflow.python.distribute import values as lib

    given = [pair[0] for pair in values] if isinstance(values, list | tuple) else [values]
    return [value.values[0] if isinstance(value, lib.DistributedValues) else value for value in given]


def device_util() -> Any:
    """The module through which strategies complete device names."""
    from tensorflow.python.distribute import device_util as module

    return module


def dataset_class() -> Any:
    """The class of every dataset, whose `_apply_debug_options` each iterator calls before it is made."""
    from tensorflow.python.data.ops import dataset_ops

    return dataset_ops.DatasetV2


def prefetching() -> Any:
    """The module behind `tf.data.experimental.prefetch_to_device`."""
    from tensorflow.python.data.experimental.ops import prefetching_ops

    return prefetching_ops


def data_modules() -> list[Any]:
    """Each loaded public spelling of `tf.data.experimental`."""
    return [
        m
        for name, m in list(sys.modules.items())
        if name.startswith("tensorflow._api.") and name.endswith(".data.experimental")
    ]


def mirrored_extended() -> Any:
    """What both MirroredStrategy classes (TF 1 and 2) are made of."""
    from tensorflow.python.distribute import mirrored_strategy

    return mirrored_strategy.MirroredExtended


def collective_extended() -> Any:
    """What every MultiWorkerMirroredStrategy class is made of."""
    from tensorflow.python.distribute import collective_all_reduce_strategy

    return collective_all_reduce_strategy.CollectiveAllReduceExtended


def central_extended() -> Any:
    """What CentralStorageStrategy and TF 1's ParameterServerStrategy are made of."""
    from tensorflow.python.distribute import parameter_server_strategy

    return parameter_server_strategy.ParameterServerStrategyExtended


def communication_options() -> Any:
    """The class behind `tf.distribute.experimental.CommunicationOptions`."""
    from tensorflow.python.distribute import collective_util

    return collective_util.Options


def cross_device_ops() -> Any:
    """The module with the ways to sum over devices."""
    from tensorflow.python.distribute import cross_device_ops as module

    return module


def replica_launcher_class() -> Any:
    """What starts the collectives of one replica."""
    from tensorflow.python.distribute import cross_device_utils

    return cross_device_utils.CollectiveReplicaLauncher


def server_class() -> Any:
    """What `tf.distribute.Server` is, and TF 1's `tf.train.Server`."""
    from tensorflow.python.training import server_lib

    return server_lib.Server


def device_lib() -> Any:
    """`tensorflow.python.client.device_lib`, which many programs call though it is private."""
    from tensorflow.python.client import device_lib as module

    return module


def device_attributes() -> Any:
    """The message that `device_lib.list_local_devices` lists."""
    from tensorflow.core.framework import device_attributes_pb2

    return device_attributes_pb2.DeviceAttributes


def public_modules() -> list[Any]:
    """Each loaded module of TensorFlow's public interface that lists devices, the TF 1 and TF 2 spellings alike."""
    return _public((".config", ".config.experimental", ".test"))


def _public(ends: tuple[str, ...]) -> list[Any]:
    return [m for name, m in list(sys.modules.items()) if name.startswith("tensorflow._api.") and name.endswith(ends)]


def defining_modules() -> list[Any]:
    """The modules in which those functions are defined."""
    from tensorflow.python.framework import config, test_util
    from tensorflow.python.platform import test

    return [config, test_util, test, device_lib()]
