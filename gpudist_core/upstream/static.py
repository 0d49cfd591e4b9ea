"""What static tensors need of TensorFlow that it does not offer: TensorFlow 2.21."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes at whose multiples TensorFlow's kernels take memory as it is."""


def plain_variable(initial_value: Any, *, device: str, name: str) -> Any:
    """A `tf.Variable` on one device, also inside a strategy's scope (which would make a distributed one).

    Args:
        initial_value: A callable without arguments that returns the first value.
        device: The device's full name.
        name: The variable's name.

    Returns:
        The variable; it is not trainable.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.variable_creator_scope(lambda next_creator, **kwargs: _create(**kwargs)), tf.device(device):
        return tf.Variable(initial_value, trainable=False, name=name)


def _create(**kwargs: Any) -> Any:
    return importlib.import_module("tensorflow.python.ops.variables").default_variable_creator_v2(None, **kwargs)


def zeros_to_own(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A tensor of zeros in memory of NumPy's, on a CPU, which a variable that is made of it takes over as it is.

    TensorFlow updates a variable in place where its buffer is its own. A tensor over foreign memory says that it is not, and
    the first update would copy all of it; a slice of such a tensor does not say so (TensorFlow 2.21).

    Args:
        shape: The shape; its size is not 0.
        dtype: A dtype of whole or floating numbers.

    Returns:
        The tensor. Nothing else refers to its memory, no page of which is touched yet.
    """
    import tensorflow as tf

    count = int(np.prod(shape, dtype=np.int64))
    raw = np.zeros((count + 1) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    flat = raw[start : start + (count + 1) * dtype.itemsize].view(dtype)
    with tf.device("CPU:0"):
        return tf.reshape(tf.experimental.dlpack.from_dlpack(flat.__dlpack__())[:count], shape)


def unmirrored(strategy: Any, initial_value: Callable[[str], Any]) -> Any:
    """A context in which a mirrored strategy's variables are made from each device's own initial value.

    The strategy itself would broadcast the first host's over the network, where it stays in memory once more (512 MiB of
    slices on each of two hosts: 1.1 GiB), and let all devices of a host start from one buffer.

    Args:
        strategy: The strategy in whose scope a variable is about to be made.
        initial_value: Makes the value, called on each device with its name.

    Returns:
        The context manager, to be entered inside the strategy's scope.
    """
    import tensorflow as tf

    distribute = importlib.import_module("tensorflow.python.distribute.distribute_utils")
    devices = strategy.extended.worker_devices

    def mirrored(next_creator: Any, **kwargs: Any) -> Any:
        return distribute.create_mirrored_variable(
            strategy, copies, distribute.VARIABLE_CLASS_MAPPING, distribute.VARIABLE_POLICY_MAPPING, **kwargs
        )

    def copies(**kwargs: Any) -> list[Any]:
        name = kwargs.pop("name", None) or "Variable"
        made: list[Any] = []
        for i, device in enumerate(devices):
            with tf.device(device):
                new_name = f"{made[0].name.split(':')[0]}/replica_{i}/" if made else name
                made.append(_create(**{**kwargs, "name": new_name, "initial_value": functools.partial(initial_value, device)}))
        return made

    return tf.variable_creator_scope(mirrored)


def is_in_dataset_function() -> bool:
    """Whether what is being traced is the function of a `tf.data` transformation: it runs on the host."""
    import tensorflow as tf

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
    """Whether Keras traces a model for its shapes alone, in no replica and for no result."""
    module = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return module is not None and bool(module.in_symbolic_scope())


def memory_limits() -> dict[str, int]:
    """Bytes that TensorFlow may use of each accelerator of this process, by the device's name without its job (`GPU:0`)."""
    tfe, session = (importlib.import_module(f"tensorflow.python.{name}") for name in ("pywrap_tfe", "client.pywrap_tf_session"))
    context = importlib.import_module("tensorflow.python.eager.context").context()
    context.ensure_initialized()
    devices = tfe.TFE_ContextListDevices(context._handle)
    found = range(session.TF_DeviceListCount(devices))
    return {
        session.TF_DeviceListName(devices, i).rpartition("/device:")[2]: int(session.TF_DeviceListMemoryBytes(devices, i))
        for i in found
        if session.TF_DeviceListType(devices, i) != "CPU"
    }
