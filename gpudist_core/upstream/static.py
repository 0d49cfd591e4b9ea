"""What static tensors need of TensorFlow that it does not offer: TensorFlow 2.21."""

from __future__ import annotations

import importlib
from typing import Any


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

    create = importlib.import_module("tensorflow.python.ops.variables").default_variable_creator_v2
    with (
        tf.init_scope(),
        tf.variable_creator_scope(lambda next_creator, **kwargs: create(None, **kwargs)),
        tf.device(device),
    ):
        return tf.Variable(initial_value, trainable=False, name=name)


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
