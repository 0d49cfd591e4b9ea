"""Compute one replica's part of a step: its share of the loss, and the gradients of that share, perhaps compiled with XLA.

XLA refuses a function that reads variables of another device than the first, and does not support the collectives of
tf.distribute. So the values of the variables are arguments, their changes are results, and the sum over the replicas stays
outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core import gradients
from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.upstream import layers, losses, runtime


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
    outputs = tf.nest.flatten(y_pred)
    masked = [i for i, value in enumerate(outputs) if losses.mask_of(value) is not None]
    if isinstance(y_pred, (tuple, list, dict)) and masked:
        warnings.warn(
            "With several outputs, masked values count unless per_example_loss leaves them out. "
            f"Received: outputs={len(outputs)}, with a mask={masked}. Put the mask into y, and apply it in the loss.",
            stacklevel=1,
        )
    return weighted(values, weight, losses.mask_of(y_pred), mask)


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
    values = gradients.wide(tf.convert_to_tensor(given))
    if values.shape.rank == 0 or not _are_of_rows(values.shape, tf.nest.flatten((y, y_pred))):
        raise UsageError(
            "per_example_loss must return a loss for each example, so that examples weigh the same on every replica",
            "Return the losses of the examples, without a mean or a sum over them.",
            loss="one number" if values.shape.rank == 0 else f"shape {tuple(values.shape)}",
        )
    check_pairs(loss, y, y_pred, values)
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
    return list(grads) if scale is None else [gradients.scale(g, _rows(share)) for g in grads]


def _rows(share: shares.Share) -> Any:
    """Return the divisor of the mean, equal on all replicas: a BatchNormalization carries a loss to the others' gradients."""
    return tf.maximum(share.total / share.num_replicas, 1.0)


def check_pairs(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any, values: Any) -> None:
    """Refuse losses of shape (rows, rows) that come from (rows,) and (rows, 1). Shape (rows, k) is allowed for every k.

    Args:
        loss: The function that returned the values.
        y: The targets.
        y_pred: The model's outputs.
        values: The losses.

    Raises:
        UsageError: If the second dimension is also the number of examples.
    """
    if values.shape.rank != 2:
        return
    for target, output in zip(tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=False):
        is_broadcast = {target.shape.rank, output.shape.rank} == {1, 2} and 1 in (*target.shape[1:], *output.shape[1:])
        if is_broadcast and _are_rows_twice(loss, y, y_pred):
            raise UsageError(
                "per_example_loss must return losses of each example, not of each pair of examples (y and y_pred were "
                "broadcast)",
                "Give y and y_pred the same shape in the loss: tf.squeeze(y_pred, -1), or y[:, tf.newaxis].",
                y_shape=tuple(target.shape),
                y_pred_shape=tuple(output.shape),
                losses_shape=tuple(values.shape),
            )


def _are_rows_twice(loss: Callable[[Any, Any], Any], y: Any, y_pred: Any) -> bool:
    """Return whether the second dimension grows with the number of examples. It is unknown if that number is unknown."""
    if not all(isinstance(value, tf.Tensor) and value.shape.rank for value in tf.nest.flatten((y, y_pred))):
        return False
    specs = [tf.nest.map_structure(lambda v: tf.TensorSpec((None, *v.shape[1:]), v.dtype), given) for given in (y, y_pred)]
    shape = tf.function(loss, autograph=False).get_concrete_function(*specs).structured_outputs.shape
    return shape.rank == 2 and shape[1] is None


class CompiledPass:
    """Run the local part of a step for a Keras model.

    Args:
        model: A Keras model.
        loss: A function (y, y_pred) -> losses of shape (rows, ...).
        synchronizes: Whether BatchNormalization uses the moments of all replicas. Such a layer is then refused.

    Raises:
        UsageError: If the model is not a Keras model.
    """

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any], *, synchronizes: bool) -> None:
        if not hasattr(model, "stateless_call"):
            raise UsageError("jit_compile=True needs a Keras 3 model", "Leave jit_compile out.", model=type(model).__name__)
        self._model, self._loss, self._synchronizes = model, loss, synchronizes
        self._compiled = tf.function(self._pass, jit_compile=True, autograph=False)

    def __call__(self, share: shares.Share, x: Any, y: Any, weight: Any, scale: Any) -> tuple[Sums, Any]:
        """Run one replica's pass.

        Args:
            share: Its share of the step.
            x: Its inputs.
            y: Its targets.
            weight: Its weights, or None.
            scale: The loss scale, a float32 scalar, or None.

        Returns:
            Its sums and the model's output.
        """
        changing = self._model.non_trainable_variables
        values = [[tf.convert_to_tensor(v.value) for v in some] for some in (self._model.trainable_variables, changing)]
        replica = tf.convert_to_tensor(share.replica)
        counts = None if scale is None else share.counts  # asked for here, as the compiled pass cannot
        grads, loss, total, (y_pred, masks), changed = self._compiled(*values, x, y, weight, replica, counts, scale)
        for variable, value in zip(changing, changed, strict=True):
            variable.assign(layers.of_all(share, variable, value))
        return Sums(grads, loss, total), tf.nest.map_structure(losses.masked, y_pred, masks)

    def _pass(
        self, trained: list[Any], changing: list[Any], x: Any, y: Any, weight: Any, replica: Any, counts: Any, scale: Any
    ) -> Any:
        with (
            shares.sharing(shares.Share(shares.rows_of(x), replica, counts)) as share,
            layers.synchronizing_batch_norm(self._synchronizes, compiled=True),
            tf.GradientTape() as tape,
        ):
            tape.watch(trained)
            y_pred, changed, own = self._model.stateless_call(trained, changing, x, training=True, return_losses=True)
            if share.num_replicas > 1:
                self._check_layers_keep_nothing(changing, changed)
            loss, total = weighted_losses(self._loss, y, y_pred, weight)
            of_variables, of_inputs = separate(self._model, own, loss.dtype)
            if of_inputs is not None:
                raise UsageError(
                    "A pass compiled by XLA does not support losses of its inputs (activity regularizers, add_loss)",
                    "Leave jit_compile out.",
                    losses=len(own),
                )
            if of_variables is not None:
                loss += of_variables * total
            target = scaled(share, loss, scale)
        outputs = y_pred, tf.nest.map_structure(losses.mask_of, y_pred)  # what a function returns has lost its masks
        return unscaled_rows(share, tape.gradient(target, trained), scale), loss, total, outputs, changed

    def _check_layers_keep_nothing(self, before: list[Any], after: list[Any]) -> None:
        """Refuse a layer that keeps a mean over its examples and may read it again.

        BatchNormalization does not read it in training.
        """
        own = {id(v) for layer in runtime.flat_layers(self._model) if layers.is_batch_norm(layer) for v in layer.variables}
        for variable, old, new in zip(self._model.non_trainable_variables, before, after, strict=True):
            if new is not old and id(variable) not in own and layers.is_of_rows(variable):
                raise UsageError(
                    "A pass compiled by XLA cannot synchronize replicas, which a layer that keeps a mean over its examples "
                    "needs",
                    "Leave jit_compile out.",
                    variable=variable.path,
                )
