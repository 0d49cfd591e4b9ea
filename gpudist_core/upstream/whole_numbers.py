"""Warn of integers in the logs of a step: logs are means over the examples, and a count is none."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares


def warn_of(name: str, value: Any) -> None:
    """Warn of integers and bools in the logs. Values computed from variables only are equal on all replicas and allowed.

    Args:
        name: The name of the log.
        value: The log's value from one replica's step.
    """
    share = shares.current()
    if share is None or share.num_replicas == 1 or isinstance(value, (tf.Variable, keras.Variable)):
        return
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating or is_of_variables(value):
        return
    warnings.warn(
        "A log of a step must be a mean over the examples: gpudist averages the logs of all replicas, weighted by examples. "
        f"Received: {name}, dtype={value.dtype.name!r}. It is treated as such a mean, so a count of examples becomes that of "
        "one replica. For a count over all replicas update a keras.metrics.Sum and return its result. Return a value that is "
        "equal "
        "on all replicas with tf.cast(value, tf.float32).",
        stacklevel=2,
    )


def is_of_variables(value: Any) -> bool:
    """Return whether a tensor of a graph is computed from variables and constants only."""
    if not tf.is_symbolic_tensor(value):
        return False
    waiting, kinds = [value.op], set()
    seen = {value.op.name}
    while waiting:
        operation = waiting.pop()
        inputs = () if operation.type == "ReadVariableOp" else operation.inputs
        if not inputs:
            kinds.add(operation.type)
        for tensor in inputs:
            if tensor.op.name not in seen:
                seen.add(tensor.op.name)
                waiting.append(tensor.op)
    return "ReadVariableOp" in kinds and kinds <= {"ReadVariableOp", "Const"}
