"""Refuse losses that broadcasting made from every example's target with every other example's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError


def check(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any, values: Any) -> None:
    """Refuse losses of shape (rows, rows) that come from (rows,) and (rows, 1). Shape (rows, k) is allowed for every k.

    Args:
        loss: The function that returned the values.
        y: The targets.
        y_pred: The model's outputs.
        values: The losses.

    Raises:
        UsageError: If the second dimension is also the number of examples.
    """
    for target, output in zip(tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=False):
        if values.shape.rank == 2 and _broadcast(target.shape, output.shape) and _are_rows_twice(loss, y, y_pred):
            raise UsageError(
                "per_example_loss must return losses of each example, not of each pair of examples (y and y_pred were "
                "broadcast)",
                "Give y and y_pred the same shape in the loss: tf.squeeze(y_pred, -1), or y[:, tf.newaxis].",
                y_shape=tuple(target.shape),
                y_pred_shape=tuple(output.shape),
                losses_shape=tuple(values.shape),
            )


def _broadcast(first: Any, second: Any) -> bool:
    """Return whether one shape is (rows,) and the other is (rows, 1)."""
    if first.rank is None or second.rank is None:
        return False
    flat, column = sorted((first, second), key=lambda shape: shape.rank)
    return bool(flat.rank == 1 and column.rank == 2 and column[1] == 1)


def _are_rows_twice(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> bool:
    """Return whether the second dimension grows with the number of examples. It is unknown if that number is unknown."""
    if not all(isinstance(value, tf.Tensor) and value.shape.rank for value in tf.nest.flatten((y, y_pred))):
        return False
    specs = [tf.nest.map_structure(lambda v: tf.TensorSpec((None, *v.shape[1:]), v.dtype), given) for given in (y, y_pred)]
    shape = tf.function(loss, autograph=False).get_concrete_function(*specs).structured_outputs.shape
    return shape.rank == 2 and shape[1] is None
