"""Change gradients as if they had been summed in another order, to measure the effect of rounding."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from emulate.probe.local_gradients import LocalGradients
from emulate.probe.plan import ProbePlan
from emulate.probe.trace import Array
from emulate.probe.variables import Names

_OF_16_BITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
Pairs = list[tuple[Any, Any]]


class RoundedGradients:
    """Change gradients by units in the last place.

    In 16 bits each replica's partial sum is rounded by itself, and where partial sums cancel much more than the last place of
    the whole sum is lost. No order of rows on one device shows that (it sums in 32 bits and rounds once), so elements are moved
    by units of their tensor's root mean square besides; what is exactly 0 stays.

    What cancels to nothing over the batch is rounding alone, and may be exactly 0 here and not on several replicas; an
    optimizer that divides by its size (Adam) makes a step of it. Where the plan names the trace of such a run, each element is
    moved by units of the largest local gradient that it has there, in the same step.

    Args:
        plan: By how many units, and whose local gradients.
        names: The variables' names.
    """

    def __init__(self, plan: ProbePlan, names: Names) -> None:
        self._plan = plan
        self._names = names

    @cached_property
    def _locals(self) -> LocalGradients | None:
        return None if self._plan.summands is None else LocalGradients(self._plan.summands)

    def changed(self, optimizer: str, pairs: Pairs) -> Pairs:
        """Return the gradients, each changed by up to `plan.perturb` units.

        Args:
            optimizer: The optimizer's name.
            pairs: Gradients and variables.

        Returns:
            The same where nothing is to be changed.
        """
        if not self._plan.perturb:
            return pairs
        generator = np.random.default_rng(self._plan.noise_seed)
        return [(self._changed(generator, optimizer, gradient, variable), variable) for gradient, variable in pairs]

    def _changed(self, generator: Any, optimizer: str, gradient: Any, variable: Any) -> Any:
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices):
            values = self._changed(generator, optimizer, gradient.values, None)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        if gradient is None or "float" not in gradient.dtype.name:
            return gradient
        of: Any = _OfArrays if isinstance(gradient, np.ndarray) else _OfTensors
        size = 2.0**-52 if gradient.dtype.name == "float64" else 2.0**-23
        least = _OF_16_BITS.get(gradient.dtype.name, 0.0)  # less than a unit would be rounded away again

        def units(cycle: int, count: float = self._plan.perturb) -> Any:
            """Return numbers of up to this many units in the last place, repeated after each cycle."""
            return of.repeated(max(count * size, least) * generator.uniform(-1, 1, cycle), flat)

        flat = of.flat(gradient)
        moved = flat * (1 + units(509))
        if self._plan.short:
            moved += of.scale(flat) * of.cast(flat != 0, flat.dtype) * units(503)
        if self._locals is not None and variable is not None:
            largest = self._locals.in_step(optimizer, self._names.of(variable), of.zeros(gradient), _largest)
            moved += of.flat(largest) * units(499, self._plan.perturb_summands)
        return of.like(moved, gradient)


class _OfArrays:
    """Compute with arrays, where steps are evaluated: a graph of all that would take longer to make than it saves."""

    flat, zeros = staticmethod(np.ravel), staticmethod(np.zeros_like)

    @staticmethod
    def like(value: Array, other: Array) -> Array:
        return value.reshape(other.shape)

    @staticmethod
    def cast(value: Array, dtype: Any) -> Array:
        return value.astype(dtype)

    @staticmethod
    def repeated(steps: Array, like: Array) -> Array:
        return np.tile(steps.astype(like.dtype), -(-like.size // len(steps)))[: like.size]

    @staticmethod
    def scale(flat: Array) -> Any:
        """Return the root mean square of the finite elements."""
        return np.sqrt(np.mean(np.square(np.where(np.isfinite(flat), flat, 0)))).astype(flat.dtype)


class _OfTensors:
    """Compute with tensors, in the graph of a step."""

    @staticmethod
    def flat(value: Any) -> Any:
        import tensorflow as tf

        return tf.reshape(value, [-1])

    @staticmethod
    def zeros(value: Any) -> Any:
        import tensorflow as tf

        return tf.zeros_like(value)

    @staticmethod
    def like(value: Any, other: Any) -> Any:
        import tensorflow as tf

        return tf.reshape(value, tf.shape(other))

    @staticmethod
    def cast(value: Any, dtype: Any) -> Any:
        import tensorflow as tf

        return tf.cast(value, dtype)

    @staticmethod
    def repeated(steps: Array, like: Any) -> Any:
        import tensorflow as tf

        return tf.gather(tf.constant(steps, like.dtype), tf.range(tf.size(like)) % len(steps))

    @staticmethod
    def scale(flat: Any) -> Any:
        """Return the root mean square of the finite elements."""
        import tensorflow as tf

        finite = tf.where(tf.math.is_finite(flat), flat, tf.zeros_like(flat))
        return tf.sqrt(tf.reduce_mean(tf.square(finite)))


def _largest(locals_: list[Array]) -> Array:
    return np.asarray(np.max(np.abs(locals_), axis=0))
