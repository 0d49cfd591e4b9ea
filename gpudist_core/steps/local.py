"""What one replica does in a step: its share of the loss, and the gradients of that share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import WrongUse
from gpudist_core.gradients.reduction import scale as times
from gpudist_core.steps import pairs
from gpudist_core.upstream import losses


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


def weighted_losses(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any, weight: Any) -> tuple[Any, Any]:
    """What a replica's losses add up to: those that count by the masks of the outputs and of the losses, as in Keras.

    Args:
        loss: Gives a loss for each row, or several, which may have a mask.
        y: The targets, of shape (rows, ...).
        y_pred: The model's outputs, of shape (rows, ...), which may have a mask.
        weight: Weights of the rows or of each loss; None for ones.

    Returns:
        The weighted sum and the sum of the weights, as `weighted` has them.
    """
    values, mask = losses_of(loss, y, y_pred)
    if isinstance(y_pred, (tuple, list, dict)):
        _warn_of_masks(y_pred)
    return weighted(values, weight, losses.mask_of(y_pred), mask)


def _warn_of_masks(y_pred: Any) -> None:
    """Say that nobody but the loss knows which of its values the mask of one of several outputs leaves out."""
    masked = [i for i, value in enumerate(tf.nest.flatten(y_pred)) if losses.mask_of(value) is not None]
    if masked:
        warnings.warn(
            "Where a model has several outputs, what their masks leave out counts unless per_example_loss leaves it out. "
            f"Received: outputs={len(tf.nest.flatten(y_pred))}, with a mask={masked}. Put the mask into y, and use it in the "
            "loss.",
            stacklevel=2,
        )


def losses_of(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> tuple[Any, Any]:
    """A replica's losses and their mask.

    Args:
        loss: Gives a loss for each row, or several.
        y: The targets, of shape (rows, ...).
        y_pred: The model's outputs, of shape (rows, ...).

    Returns:
        The losses, float32, of shape (rows, ...), or one after the other of shape (rows * n, ...); the mask that the loss left
        on them (`ignore_class` does), of their shape, or None.

    Raises:
        WrongUse: When the losses are one number, or cannot be those of rows by their shape.
    """
    given = loss(y, y_pred)
    if given is None:
        raise WrongUse("per_example_loss returns a loss for each row", "Return it.", loss=None)
    if isinstance(given, (tuple, list, dict)):
        raise WrongUse(
            "per_example_loss returns one tensor with a loss for each row",
            "Add several losses of a row up.",
            loss=type(given).__name__,
        )
    values = tf.cast(given, tf.float32)
    if values.shape.rank == 0 or not _are_of_rows(values.shape, tf.nest.flatten((y, y_pred))):
        raise WrongUse(
            "per_example_loss gives a loss for each row, so that rows weigh the same on every replica",
            "Return the rows' losses, without a mean or a sum over them.",
            loss="one number" if values.shape.rank == 0 else f"shape {tuple(values.shape)}",
        )
    pairs.check(loss, y, y_pred, values)
    return values, losses.mask_of(given)


def _are_of_rows(shape: Any, given: list[Any]) -> bool:
    """Whether losses of a shape can be those of the rows given; what is known at tracing alone can tell."""
    rows = {value.shape[0] for value in given if value.shape.rank}
    if shape.rank is None or shape[0] is None or not rows:
        return True
    return any(number is not None and (number == 0 or shape[0] % number == 0) for number in rows)


def weighted(values: Any, *factors: Any) -> tuple[Any, Any]:
    """The weighted sum of a replica's losses and the sum of their weights.

    Args:
        values: Losses, float32 of shape (rows, ...).
        *factors: Weights and masks of the rows or of each value, broadcast over what follows; None for ones.

    Returns:
        Two float32 scalars; both are 0 without rows.
    """
    given = [factor for factor in factors if factor is not None]
    if not given:
        return tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32)
    weights = tf.ones_like(values)
    for factor in given:
        weights *= alongside(tf.cast(factor, tf.float32), values)
    return tf.reduce_sum(tf.where(weights == 0, 0.0, values) * weights), tf.reduce_sum(weights)


def alongside(factor: Any, values: Any) -> Any:
    """Weights in a form that broadcasts over values: what is 1 too many at the end goes, what is missing there is 1.

    Args:
        factor: A factor for each row, or for each of its values; shape (rows, ...).
        values: Of shape (rows, ...).

    Returns:
        The factor, of the rank of the values.

    Raises:
        WrongUse: Where it does not fit.
    """
    while factor.shape.rank > values.shape.rank and factor.shape[-1] == 1:
        factor = tf.squeeze(factor, -1)
    if factor.shape.rank > values.shape.rank or not values.shape[: factor.shape.rank].is_compatible_with(
        tf.TensorShape([None if size == 1 else size for size in factor.shape])
    ):
        raise WrongUse(
            "A weight or a mask must be one for each row, or one for each of its losses",
            "Give it the shape (rows,), or that of the losses.",
            weight_shape=tuple(factor.shape),
            losses_shape=tuple(values.shape),
        )
    return tf.reshape(factor, tf.concat([tf.shape(factor), [1] * (values.shape.rank - factor.shape.rank)], 0))


def separate(model: Any, losses: list[Any]) -> tuple[Any, Any]:
    """A model's own losses: those of its variables (regularisers) and those of its inputs (activity, `add_loss`).

    Args:
        model: What was just called.
        losses: Its losses.

    Returns:
        Two float32 scalars; each is None where there are none.
    """
    sums = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
    # Keras lists the regularisers' losses last.
    regularized = sum(getattr(v, "regularizer", None) is not None for v in getattr(model, "trainable_variables", []))
    of_inputs, of_variables = sums[: len(sums) - regularized], sums[len(sums) - regularized :]
    return tuple(tf.add_n(some) if some else None for some in (of_variables, of_inputs))  # type: ignore[return-value]


def scaled(share: shares.Share, loss: Any, scale: Any) -> Any:
    """What is differentiated: the sum, or with a loss scale about the scaled mean of the rows, as 16-bit floats end at 65504.

    Args:
        share: This replica's share of the step.
        loss: The sum: a float32 scalar.
        scale: The loss scale: a float32 scalar, or None.

    Returns:
        A float32 scalar.
    """
    return loss if scale is None else loss / _rows(share) * scale


def unscaled_rows(share: shares.Share, grads: list[Any], scale: Any) -> list[Any]:
    """The gradients of the sum again, where those of the mean were taken; they stay scaled.

    Args:
        share: This replica's share of the step.
        grads: A gradient for each variable, or None.
        scale: The loss scale, or None.

    Returns:
        The gradients.
    """
    return list(grads) if scale is None else [times(g, _rows(share)) for g in grads]


def _rows(share: shares.Share) -> Any:
    """Rows of a replica in the mean, the same for all: through a BatchNormalization a loss reaches the others' gradients."""
    return tf.maximum(share.total / share.num_replicas, 1.0)
