"""Provide what static tensors need and TensorFlow 2.21 does not offer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.upstream import runtime

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
