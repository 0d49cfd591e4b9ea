"""Sum gradients, losses and weights over all replicas, in one collective for each dtype.

Gradients are checked and clipped after that: by value, by each norm, or by the global norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.state import of_variable
from gpudist_core.upstream import models
from gpudist_core.upstream import runtime as upstream


def sum_over_replicas(grads: list[Any], variables: list[Any], *, differentiable: bool = False) -> list[Any]:
    """Sum the gradients over the replicas. The gradient of a sharded variable is already its slice's total.

    Args:
        grads: A tensor or `tf.IndexedSlices` for each variable, or None.
        variables: The variables, in the same order.
        differentiable: Whether the sums must be differentiable.

    Returns:
        The sums, in the same order, equal on all replicas (except for sharded variables).
    """
    sums, _ = sum_with(grads, variables, [], differentiable=differentiable)
    return sums


def sum_with(
    grads: list[Any], variables: list[Any], extras: list[Any], *, differentiable: bool = False
) -> tuple[list[Any], list[Any]]:
    """Sum gradients as `sum_over_replicas` does, and other tensors in the same collective if their dtype is the same.

    Args:
        grads: A tensor or `tf.IndexedSlices` for each variable, or None.
        variables: The variables, in the same order.
        extras: Tensors whose shapes are equal on all replicas.
        differentiable: Whether the sums must be differentiable.

    Returns:
        The sums of the gradients and the sums of the extras.
    """
    context = tf.distribute.get_replica_context()
    shared = [i for i, (g, v) in enumerate(zip(grads, variables, strict=True)) if g is not None and not is_sharded(v)]
    together = [grads[i] for i in shared] + list(extras)
    if context is not None and context.num_replicas_in_sync > 1:
        together = _all_reduced(context, together, differentiable=differentiable)
    sums = list(grads)
    for i, value in zip(shared, together, strict=False):
        sums[i] = value
    return sums, together[len(shared) :]


def all_reduce(value: Any) -> Any:
    """Sum one tensor over all replicas, differentiably. With one replica, return the tensor itself."""
    return sum_with([], [], [value], differentiable=True)[1][0]


def all_reduce_all(values: list[Any]) -> list[Any]:
    """Sum several tensors over all replicas, in one collective for each dtype."""
    return sum_with([], [], values)[1]


def _all_reduced(context: Any, values: list[Any], *, differentiable: bool) -> list[Any]:
    """Sum one dtype after the other: TensorFlow 2.21 packs what it sums, and cannot pack two dtypes together.

    What NCCL does not take is summed in a dtype that it does.
    """
    by_dtype: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(place)
    sums = list(values)
    for dtype, places in by_dtype.items():
        wide = _summed_in(dtype)
        given = [with_values(values[place], tf.cast(values_of(values[place]), wide)) for place in places]
        summed = upstream.all_reduce(context, given, differentiable=differentiable)
        for place, value in zip(places, summed, strict=True):
            sums[place] = with_values(value, tf.cast(values_of(value), dtype))
    return sums


def _summed_in(dtype: Any) -> Any:
    """Return the dtype in which a tensor is summed: half, float, double, int64 and non-numeric types stay as they are.

    Collectives on GPUs refuse int32, whose tensors TensorFlow keeps in the host's memory.
    """
    if dtype == tf.bfloat16:
        return tf.float32
    return tf.int64 if dtype == tf.bool or dtype.is_integer else dtype


def gathered(value: Any) -> Any:
    """Gather the rows of all replicas, in the order of the replicas.

    Args:
        value: A tensor of shape (rows, ...).

    Returns:
        A tensor of its dtype, equal on all replicas.

    Raises:
        UsageError: For strings, and for tensors that are not dense with a row for each example: collectives do not take them.
    """
    if not isinstance(value, tf.Tensor) or value.dtype == tf.string or not value.shape.rank:
        raise UsageError(
            "On several hosts a model's predictions must be dense numeric tensors with one row for each example",
            "Return numbers, and convert them to strings on each host.",
            output=type(value).__name__,
            dtype=getattr(value, "dtype", None),
            shape=getattr(value, "shape", None),
        )
    context = tf.distribute.get_replica_context()
    return tf.cast(context.all_gather(tf.cast(value, _summed_in(value.dtype)), axis=0), value.dtype)


def is_sharded(variable: Any) -> bool:
    """Return whether each replica holds a different slice of a table in this variable. A table in one piece does not count."""
    shard = shard_of(variable)
    return shard is not None and shard.total_replicas > 1


def shard_of(variable: Any) -> Any:
    """Return the `ShardInfo` of a variable with slices of a table, or None."""
    kept = of_variable.known(models.plain(variable))
    return None if kept is None else kept.shard


def agree_on_finite(grads: list[Any], variables: list[Any]) -> list[Any]:
    """Make a slice that is not finite on one replica visible on all, so that all replicas skip the update or none does."""
    sharded = [g for g, v in zip(grads, variables, strict=True) if g is not None and is_sharded(v)]
    if not sharded:
        return grads
    bad = [tf.reduce_any(~tf.math.is_finite(values_of(g))) for g in sharded]
    anywhere = all_reduce(tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)) > 0
    poison = tf.where(anywhere, tf.constant(float("nan")), tf.constant(0.0))
    first = next(i for i, g in enumerate(grads) if g is not None)
    return [add(g, poison) if i == first else g for i, g in enumerate(grads)]


def values_of(gradient: Any) -> Any:
    """Return the values of a dense or sparse gradient."""
    return gradient.values if hasattr(gradient, "indices") else gradient


def with_values(gradient: Any, values: Any) -> Any:
    """Return a gradient of the same form with other values."""
    if not hasattr(gradient, "indices"):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def add(gradient: Any, number: Any) -> Any:
    """Add a scalar to a gradient, in the gradient's dtype."""
    values = values_of(gradient)
    return with_values(gradient, values + tf.cast(number, values.dtype))


def scale(gradient: Any, factor: Any) -> Any:
    """Multiply a gradient by a scalar, in the gradient's dtype."""
    if gradient is None:
        return None
    values = values_of(gradient)
    # `tf.cast` rounds a Python number to float32 first.
    return with_values(gradient, values * (tf.cast(factor, values.dtype) if tf.is_tensor(factor) else factor))


def wide(values: Any) -> Any:
    """Return numbers as float64 if they are, else as float32."""
    return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)


def merge_repeated(gradient: Any) -> Any:
    """Sum the repeated indices of a sparse gradient: norms and squares of its values are then those of the whole gradient."""
    if not hasattr(gradient, "indices"):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


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
            return [g if g is None else with_values(g, tf.clip_by_value(values_of(g), -bound, bound)) for g in grads]
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


def clipping_of(optimizer: Any) -> Clipping:
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


def _squared_norms(grads: list[Any], variables: list[Any]) -> list[Any]:
    """Return squared L2 norms, float32 or wider. For sharded variables, all slices count."""

    def square(gradient: Any) -> Any:
        return tf.reduce_sum(tf.square(wide(values_of(gradient))))

    squares = [g if g is None else square(g) for g in grads]
    places = [i for i, (g, v) in enumerate(zip(grads, variables, strict=True)) if g is not None and is_sharded(v)]
    if places:
        sums = all_reduce(tf.stack([squares[i] for i in places]))
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
    return scale(gradient, tf.where(tf.math.is_finite(norm), factor, tf.constant(float("nan"), norm.dtype)))


FiniteCheck = Callable[[list[Any], list[Any]], list[Any]]


@contextlib.contextmanager
def checking_finite(*, on: bool) -> Iterator[FiniteCheck]:
    """Check gradients while an update is traced. If a gradient is not finite, nothing after the check runs.

    Args:
        on: Whether to check.

    Yields:
        A function of the gradients (None for a missing one) and their variables, to be called once; it returns the gradients.
        Code that depends on them raises `InvalidArgumentError`, which names the variable.
    """
    with contextlib.ExitStack() as rest:

        def checked(grads: list[Any], variables: list[Any]) -> list[Any]:
            if not on:
                return grads
            named = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            checks = [tf.debugging.check_numerics(values_of(g), f"gradient of {v.name}") for g, v in named]
            rest.enter_context(tf.control_dependencies(checks))
            return [g if g is None else with_values(g, tf.identity(values_of(g))) for g in grads]

        yield checked
