"""Losses that broadcasting made of every row's target with every other row's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core.errors import WrongUse


def check(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any, values: Any) -> None:
    """Refuse losses of shape (rows, rows) that came of (rows,) and (rows, 1); (rows, k) is right, whatever k is.

    Args:
        loss: Gave the values.
        y: The targets.
        y_pred: The model's outputs.
        values: The losses.

    Raises:
        WrongUse: Where their second dimension is that of the rows.
    """
    for target, output in zip(tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=False):
        if values.shape.rank == 2 and _broadcast(target.shape, output.shape) and _are_rows_twice(loss, y, y_pred):
            raise WrongUse(
                "per_example_loss gives losses of each row, not of each row with every other one, as broadcasting makes them",
                "Give y and y_pred one shape in the loss: tf.squeeze(y_pred, -1), or y[:, tf.newaxis].",
                y_shape=tuple(target.shape),
                y_pred_shape=tuple(output.shape),
                losses_shape=tuple(values.shape),
            )


def _broadcast(one: Any, other: Any) -> bool:
    """Whether one is (rows,) and the other (rows, 1)."""
    if one.rank is None or other.rank is None:
        return False
    flat, column = sorted((one, other), key=lambda shape: shape.rank)
    return bool(flat.rank == 1 and column.rank == 2 and column[1] == 1)


def _are_rows_twice(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> bool:
    """Whether the second dimension grows with the rows: nobody knows it where nobody knows how many rows there are."""
    if not all(isinstance(one, tf.Tensor) and one.shape.rank for one in tf.nest.flatten((y, y_pred))):
        return False
    specs = [tf.nest.map_structure(lambda v: tf.TensorSpec((None, *v.shape[1:]), v.dtype), given) for given in (y, y_pred)]
    shape = tf.function(loss, autograph=False).get_concrete_function(*specs).structured_outputs.shape
    return shape.rank == 2 and shape[1] is None
