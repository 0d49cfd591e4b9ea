"""Run with the gradients of another run, so that the weights stay equal to that run's, step after step.

Where rounding is amplified from step to step, two correct runs are soon so far apart that their gradients tell nothing. Here
each step's gradients are taken at weights that are the other run's but for the rounding of one update: what differs differs in
this step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from emulate.probe.local_gradients import LocalGradients
from emulate.probe.plan import Follow, ProbePlan
from emulate.probe.rounding import Pairs, RoundedGradients
from emulate.probe.trace import Array
from emulate.probe.variables import Names

_LARGE = 1 << 24
"""Largest number of elements of a table whose sparse gradient is made dense. Larger tables keep the gradient of the run."""


class Following:
    """Apply the other run's gradients, rounded as in this run.

    Args:
        plan: Whose gradients, and by how much they are off.
        names: The variables' names.
    """

    def __init__(self, plan: ProbePlan, names: Names) -> None:
        self._follow = plan.follow
        self._rounding = RoundedGradients(plan, names)
        self._names = names

    def applied(self, optimizer: str, own: Pairs, recorded: Pairs) -> Pairs:
        """Return the gradients for an optimizer.

        Args:
            optimizer: The optimizer's name.
            own: Gradients and variables as the program has them.
            recorded: The same as they are recorded.

        Returns:
            `recorded` where no run is followed.
        """
        if self._follow is None:
            return recorded
        given = [(self._given(self._follow, optimizer, gradient, variable), variable) for gradient, variable in own]
        return self._rounding.changed(optimizer, given)

    @cached_property
    def _locals(self) -> LocalGradients:
        assert self._follow is not None
        return LocalGradients(self._follow.trace)

    def _given(self, follow: Follow, optimizer: str, gradient: Any, variable: Any) -> Any:
        import tensorflow as tf

        if gradient is None or "float" not in gradient.dtype.name:
            return gradient
        is_mean = optimizer in follow.averaged
        join = _mean if is_mean else _sum
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if is_sparse and np.prod(variable.shape) > _LARGE:
            return gradient
        whole = self._locals.in_step(
            optimizer,
            self._names.of(variable),
            tf.convert_to_tensor(gradient) if is_sparse else gradient,
            join,
            lambda total, number: total / number if is_mean else total,
        )
        if not is_sparse:
            return whole
        return _with_total(gradient, whole)


def _with_total(gradient: Any, whole: Any) -> Any:
    """Return a sparse gradient with another total.

    It names the same rows, as often as before: some optimizers make another update of a row that comes twice.
    """
    import tensorflow as tf

    size, indices = tf.shape(whole)[0], gradient.indices
    counts = tf.cast(tf.math.unsorted_segment_sum(tf.ones_like(indices), indices, size), whole.dtype)
    change = whole - tf.math.unsorted_segment_sum(gradient.values, indices, size)
    shape = tf.concat([tf.shape(counts), tf.ones_like(tf.shape(whole)[1:])], 0)
    each = change / tf.reshape(tf.maximum(counts, 1), shape)
    is_changed = tf.reduce_any(tf.reshape(change, [size, -1]) != 0, axis=1)
    missing = tf.cast(tf.reshape(tf.where(is_changed & (counts == 0)), [-1]), indices.dtype)
    values = tf.concat([gradient.values + tf.gather(each, indices), tf.gather(change, missing)], 0)
    return tf.IndexedSlices(values, tf.concat([indices, missing], 0), gradient.dense_shape)


def _sum(locals_: list[Array]) -> Array:
    return np.asarray(np.sum(locals_, axis=0, dtype=_wide(locals_[0])))


def _mean(locals_: list[Array]) -> Array:
    return np.asarray(np.mean(locals_, axis=0, dtype=_wide(locals_[0])))


def _wide(array: Array) -> Any:
    """Return a wide enough dtype: sums in 16 bits would be rounded unlike in any all-reduce."""
    return np.promote_types(array.dtype, np.float32)
