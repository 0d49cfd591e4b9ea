"""Clip gradients that are already summed over all replicas: by value, by each norm, or by the global norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.gradients import reduction


@dataclass(frozen=True)
class Clipping:
    """Clip gradients in at most one of three ways, defined as in Keras.

    Attributes:
        by_norm: The largest L2 norm of each variable's gradient.
        by_global_norm: The largest L2 norm of all gradients together.
        by_value: The largest absolute value of each element.

    Raises:
        UsageError: If more than one is given, or one is not positive.
    """

    by_norm: float | None = None
    by_global_norm: float | None = None
    by_value: float | None = None

    def __post_init__(self) -> None:
        given = {name.replace("by_", "clip_"): value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise UsageError("At most one kind of clipping can be used", **given)
        for name, value in given.items():
            if not _is_positive(value):
                raise UsageError(
                    "A bound for gradients must be a positive number", "Leave it out for no clipping.", **{name: value}
                )

    def __call__(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Return the clipped gradients.

        Args:
            grads: Gradients of all replicas together, each row of a sparse one once; of a sharded variable, this slice's.
            variables: The variables, in the same order.

        Returns:
            Gradients of the same forms and dtypes.
        """
        if self.by_norm is None and self.by_global_norm is None and self.by_value is None:
            return grads
        if self.by_value is not None:
            bound = self.by_value
            return [g if g is None else _map(g, lambda v: tf.clip_by_value(v, -bound, bound)) for g in grads]
        if self.by_norm is not None:
            squares = _squared_norms(grads, variables)
            norms = [square if square is None else tf.sqrt(square) for square in squares]
            return [g if g is None else to_norm(g, norm, self.by_norm) for g, norm in zip(grads, norms, strict=True)]
        total = global_norm(grads, variables)
        return [g if g is None else to_norm(g, total, float(self.by_global_norm or 0)) for g in grads]


def _is_positive(value: Any) -> bool:
    try:
        return not isinstance(value, (str, bool)) and bool(value > 0)
    except (TypeError, ValueError):  # lists, arrays
        return False


def of_optimizer(optimizer: Any) -> Clipping:
    """Return the clipping that a Keras optimizer is configured with: `clipnorm`, `global_clipnorm` or `clipvalue`."""
    return Clipping(optimizer.clipnorm or None, optimizer.global_clipnorm or None, optimizer.clipvalue or None)


def global_norm(grads: list[Any], variables: list[Any]) -> Any:
    """Return the L2 norm of all gradients together: sqrt(sum of squares). For a sharded variable, all slices count.

    Args:
        grads: Gradients summed over all replicas, or None; for a sharded variable, this slice's. At least one is not None.
        variables: The variables, in the same order.

    Returns:
        A scalar, float32 or wider.
    """
    return tf.sqrt(tf.add_n([square for square in _squared_norms(grads, variables) if square is not None]))


def _map(gradient: Any, function: Any) -> Any:
    return reduction.with_values(gradient, function(reduction.values_of(gradient)))


def _squared_norms(grads: list[Any], variables: list[Any]) -> list[Any]:
    """Return squared L2 norms, float32 or wider. For sharded variables, all slices count."""

    def square(gradient: Any) -> Any:
        return tf.reduce_sum(tf.square(reduction.wide(reduction.values_of(gradient))))

    squares = [g if g is None else square(g) for g in grads]
    places = [i for i, (g, v) in enumerate(zip(grads, variables, strict=True)) if g is not None and reduction.is_sharded(v)]
    if places:
        sums = reduction.all_reduce(tf.stack([squares[i] for i in places]))
        for position, i in enumerate(places):
            squares[i] = sums[position]
    return squares


def to_norm(gradient: Any, norm: Any, bound: float) -> Any:
    """Scale a gradient down to `bound` if its norm is larger. A norm that is not finite gives NaN, as in Keras.

    Args:
        gradient: A gradient, or one of several.
        norm: The L2 norm of this gradient, or of all of them: a scalar.
        bound: The largest norm.

    Returns:
        A gradient of the same form and dtype.
    """
    factor = bound / tf.maximum(norm, bound)
    return reduction.scale(gradient, tf.where(tf.math.is_finite(norm), factor, tf.constant(float("nan"), norm.dtype)))
