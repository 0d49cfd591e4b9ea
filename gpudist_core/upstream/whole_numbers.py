"""Whole numbers in the logs of a step: of numbers the logs have the mean over the rows, and a count is none."""

from __future__ import annotations

import warnings
from typing import Any

from gpudist_core import share as shares


def warn_of(name: str, value: Any) -> None:
    """Say for what whole numbers and truth values in the logs are taken; variables, and what they make, are alike anywhere.

    Args:
        name: Of the log.
        value: What one replica's step returned for it.
    """
    import keras
    import tensorflow as tf

    share = shares.current()
    if share is None or share.num_replicas == 1 or isinstance(value, (tf.Variable, keras.Variable)):
        return
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating or is_of_variables(value):
        return
    warnings.warn(
        "A number in the logs of a step must be a mean over the rows, as logs have the mean of all replicas by their rows. "
        f"Received: {name}, dtype={value.dtype.name!r}. It is taken for such a mean: a count of a replica's rows becomes the "
        "rows of one replica. For a count over all replicas update a keras.metrics.Sum and return its result; what is the same "
        "on all replicas return by tf.cast(value, tf.float32).",
        stacklevel=2,
    )


def is_of_variables(value: Any) -> bool:
    """Whether a tensor of a graph is made of variables, and of constants besides."""
    import tensorflow as tf

    if not tf.is_symbolic_tensor(value):
        return False
    waiting, kinds = [value.op], set()
    seen = {value.op.name}
    while waiting:
        operation = waiting.pop()
        inputs = () if operation.type == "ReadVariableOp" else operation.inputs
        if not inputs:
            kinds.add(operation.type)
        for one in inputs:
            if one.op.name not in seen:
                seen.add(one.op.name)
                waiting.append(one.op)
    return "ReadVariableOp" in kinds and kinds <= {"ReadVariableOp", "Const"}
