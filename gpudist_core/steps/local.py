"""What one replica does in a step: its share of the loss, and the gradients of that share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpudist_core import share as shares
from gpudist_core.gradients.reduction import scale as times


@dataclass(frozen=True)
class Sums:
    """What a replica's rows add up to; every number is a sum, so that replicas and batches can simply be added.

    Attributes:
        grads: The gradient of `loss` for each variable.
        loss: The weighted sum of the rows' losses, and the losses of the model times `weight`: a float32 scalar.
        weight: The sum of the weights: a float32 scalar.
    """

    grads: list[Any]
    loss: Any
    weight: Any


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """(x, y, weight) of a batch (x, y) or (x, y, weight)."""
    x, y, *weight = batch
    return x, y, weight[0] if weight else None


def weighted(values: Any, weight: Any, mask: Any) -> tuple[Any, Any]:
    """The weighted sum of a replica's losses and the sum of their weights.

    Args:
        values: Losses, shape (rows, ...).
        weight: Weights of the rows or of each value, broadcast over what follows; None for ones.
        mask: Which values count, shape (rows, ...); None for all.

    Returns:
        Two float32 scalars; both are 0 without rows.
    """
    import tensorflow as tf

    values = tf.cast(values, tf.float32)
    weights = tf.ones_like(values)
    for factor in (weight, mask):
        if factor is not None:
            factor = tf.cast(factor, tf.float32)
            while factor.shape.rank > values.shape.rank and factor.shape[-1] == 1:
                factor = tf.squeeze(factor, -1)
            weights *= tf.reshape(factor, tf.concat([tf.shape(factor), [1] * (values.shape.rank - factor.shape.rank)], 0))
    return tf.reduce_sum(tf.where(weights == 0, 0.0, values) * weights), tf.reduce_sum(weights)


def additional(model: Any) -> tuple[Any, Any]:
    """A model's own losses: those of its variables (regularisers) and those of its inputs (activity, `add_loss`).

    Args:
        model: What was just called.

    Returns:
        Two float32 scalars; each is None where there are none.
    """
    import tensorflow as tf

    losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in getattr(model, "losses", [])]
    # Keras lists the regularisers' losses last.
    regularized = sum(getattr(v, "regularizer", None) is not None for v in getattr(model, "trainable_variables", []))
    of_inputs, of_variables = losses[: len(losses) - regularized], losses[len(losses) - regularized :]
    return tuple(tf.add_n(some) if some else None for some in (of_variables, of_inputs))  # type: ignore[return-value]


def local_sums(forward: Callable[[], tuple[Any, Any]], variables: list[Any], scale: Callable[[Any], Any] | None) -> Sums:
    """One replica's forward and backward pass.

    Args:
        forward: Returns `loss` and `weight` as in `Sums`.
        variables: What the gradients are of.
        scale: The optimizer's loss scaling; None without one.

    Returns:
        The sums; the gradients are scaled.
    """
    import tensorflow as tf

    share = shares.current()
    # 16-bit floats end at 65504: with a loss scale the mean over the rows is what is differentiated, not the sum.
    rows = None if scale is None or share is None else tf.maximum(tf.cast(share.rows, tf.float32), 1.0)
    with tf.GradientTape() as tape:
        loss, weight = forward()
        target = loss if scale is None or rows is None else scale(loss / rows)
    grads = tape.gradient(target, variables)
    if rows is not None:
        grads = [times(g, rows) for g in grads]
    return Sums(list(grads), loss, weight)
