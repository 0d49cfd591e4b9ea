"""Compute one replica's part of a step: its share of the loss, and the gradients of that share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.gradients import reduction
from gpudist_core.steps import pairs
from gpudist_core.upstream import losses


@dataclass(frozen=True)
class Sums:
    """Hold the sums over a replica's examples. Sums of replicas and batches can be added.

    Attributes:
        grads: The gradient of `loss` for each variable.
        loss: The weighted sum of the examples' losses, plus the model's losses times `weight`: a scalar, float32 or float64.
        weight: The sum of the weights: a scalar of the same dtype.
    """

    grads: list[Any]
    loss: Any
    weight: Any


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Return (x, y, weight) for a batch (x, y) or (x, y, weight)."""
    x, y, *weight = batch
    return x, y, weight[0] if weight else None


def weighted_losses(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any, weight: Any) -> tuple[Any, Any]:
    """Sum a replica's losses. The masks of the outputs and of the losses decide which losses count, as in Keras.

    Args:
        loss: A function that returns one or more losses for each example, perhaps with a mask.
        y: The targets, of shape (rows, ...).
        y_pred: The model's outputs, of shape (rows, ...), perhaps with a mask.
        weight: Weights of the examples or of each loss; None for ones.

    Returns:
        The weighted sum and the sum of the weights, as from `weighted`.
    """
    values, mask = losses_of(loss, y, y_pred)
    if isinstance(y_pred, (tuple, list, dict)):
        _warn_of_masks(y_pred)
    return weighted(values, weight, losses.mask_of(y_pred), mask)


def _warn_of_masks(y_pred: Any) -> None:
    """Warn that, with several outputs, only the loss function can apply the masks of the outputs."""
    masked = [i for i, value in enumerate(tf.nest.flatten(y_pred)) if losses.mask_of(value) is not None]
    if masked:
        warnings.warn(
            "With several outputs, masked values count unless per_example_loss leaves them out. "
            f"Received: outputs={len(tf.nest.flatten(y_pred))}, with a mask={masked}. Put the mask into y, and apply it in the "
            "loss.",
            stacklevel=2,
        )


def losses_of(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return a replica's losses and their mask.

    Args:
        loss: A function that returns one or more losses for each example.
        y: The targets, of shape (rows, ...).
        y_pred: The model's outputs, of shape (rows, ...).

    Returns:
        The losses: float32 or float64, of shape (rows, ...), or concatenated with shape (rows * n, ...). Their mask (from
        `ignore_class` for example), of the same shape, or None.

    Raises:
        UsageError: If the loss is one number, or its shape does not match the number of examples.
    """
    given = loss(y, y_pred)
    if given is None:
        raise UsageError("per_example_loss must return a loss for each example", loss=None)
    if isinstance(given, (tuple, list, dict)):
        raise UsageError(
            "per_example_loss must return one tensor with a loss for each example",
            "Add the losses of an example.",
            loss=type(given).__name__,
        )
    values = reduction.wide(tf.convert_to_tensor(given))
    if values.shape.rank == 0 or not _are_of_rows(values.shape, tf.nest.flatten((y, y_pred))):
        raise UsageError(
            "per_example_loss must return a loss for each example, so that examples weigh the same on every replica",
            "Return the losses of the examples, without a mean or a sum over them.",
            loss="one number" if values.shape.rank == 0 else f"shape {tuple(values.shape)}",
        )
    pairs.check(loss, y, y_pred, values)
    return values, losses.mask_of(given)


def _are_of_rows(shape: Any, given: list[Any]) -> bool:
    """Return whether losses of this shape can belong to these examples, as far as static shapes tell."""
    rows = {value.shape[0] for value in given if value.shape.rank}
    if shape.rank is None or shape[0] is None or not rows:
        return True
    return any(number is not None and (number == 0 or shape[0] % number == 0) for number in rows)


def weighted(values: Any, *factors: Any) -> tuple[Any, Any]:
    """Return the weighted sum of a replica's losses and the sum of their weights.

    Args:
        values: Losses, float32 or float64, of shape (rows, ...).
        *factors: Weights and masks of the examples or of each loss, broadcast over the last dimensions; None for ones.

    Returns:
        Two scalars of the losses' dtype; both are 0 without examples.
    """
    given = [factor for factor in factors if factor is not None]
    if not given:
        return tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype)
    weights = tf.ones_like(values)
    for factor in given:
        weights *= alongside(tf.cast(factor, values.dtype), values)
    return tf.reduce_sum(tf.where(weights == 0, tf.zeros_like(values), values) * weights), tf.reduce_sum(weights)


def alongside(factor: Any, values: Any) -> Any:
    """Reshape weights so that they broadcast over values: drop trailing dimensions of size 1, or append them.

    Args:
        factor: A factor for each example, or for each of its losses; shape (rows, ...).
        values: A tensor of shape (rows, ...).

    Returns:
        The factor, with the rank of the values.

    Raises:
        UsageError: If the shapes do not match.
    """
    while factor.shape.rank > values.shape.rank and factor.shape[-1] == 1:
        factor = tf.squeeze(factor, -1)
    if factor.shape.rank > values.shape.rank or not values.shape[: factor.shape.rank].is_compatible_with(
        tf.TensorShape([None if size == 1 else size for size in factor.shape])
    ):
        raise UsageError(
            "A weight or a mask must have one value for each example, or one for each of its losses",
            "Give it the shape (rows,), or that of the losses.",
            weight_shape=tuple(factor.shape),
            losses_shape=tuple(values.shape),
        )
    return tf.reshape(factor, tf.concat([tf.shape(factor), [1] * (values.shape.rank - factor.shape.rank)], 0))


def separate(model: Any, losses: list[Any], dtype: Any) -> tuple[Any, Any]:
    """Separate a model's own losses: those of its variables (regularizers) and those of its inputs (activity, `add_loss`).

    Args:
        model: The model that was just called.
        losses: Its losses.
        dtype: That of the examples' losses.

    Returns:
        Two scalars of this dtype; each is None if there is no such loss.
    """
    sums = [tf.reduce_sum(tf.cast(loss, dtype)) for loss in losses]
    # Keras lists the regularisers' losses last.
    regularized = sum(getattr(v, "regularizer", None) is not None for v in getattr(model, "trainable_variables", []))
    of_inputs, of_variables = sums[: len(sums) - regularized], sums[len(sums) - regularized :]
    return tuple(tf.add_n(some) if some else None for some in (of_variables, of_inputs))  # type: ignore[return-value]


def scaled(share: shares.Share, loss: Any, scale: Any) -> Any:
    """Return the value to differentiate: the sum, or with a loss scale about the scaled mean of the examples.

    Args:
        share: This replica's share of the step.
        loss: The sum: a scalar.
        scale: The loss scale: a float32 scalar, or None.

    Returns:
        A scalar of the loss's dtype.
    """
    return loss if scale is None else loss / tf.cast(_rows(share), loss.dtype) * tf.cast(scale, loss.dtype)


def unscaled_rows(share: shares.Share, grads: list[Any], scale: Any) -> list[Any]:
    """Turn gradients of the mean back into gradients of the sum. They stay scaled.

    Args:
        share: This replica's share of the step.
        grads: A gradient for each variable, or None.
        scale: The loss scale, or None.

    Returns:
        The gradients.
    """
    return list(grads) if scale is None else [reduction.scale(g, _rows(share)) for g in grads]


def _rows(share: shares.Share) -> Any:
    """Return the divisor of the mean, equal on all replicas: a BatchNormalization carries a loss to the others' gradients."""
    return tf.maximum(share.total / share.num_replicas, 1.0)
