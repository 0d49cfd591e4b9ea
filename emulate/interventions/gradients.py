"""Change the gradients of a run: as if they were summed in another order, or to those of another run.

The first measures the effect of rounding. The second keeps the weights equal to those of the other run, step after step. Where
rounding is amplified from step to step, two correct runs are soon so far apart that their gradients tell nothing. Here each
step's gradients are taken at weights that are the other run's but for the rounding of one update: what differs differs in this
step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emulate import graph_functions
from emulate.imports import tf
from emulate.recorder import Follow, ProbePlan, outlet
from emulate.trace import Array, Step, Trace
from emulate.upstream import Names


class LocalGradients:
    """Read another run's local gradients.

    Args:
        trace: The other run's trace.
    """

    def __init__(self, trace: Path) -> None:
        self._trace = Trace(trace)
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()

    def in_step(
        self,
        optimizer: str,
        tensor: str,
        otherwise: Any,
        join: Callable[[list[Array]], Array],
        of_sum: Callable[[Array, int], Array] | None = None,
    ) -> Any:
        """Return a tensor's value in this step. Steps are counted here: each tensor is read once in each.

        Args:
            optimizer: The optimizer's name.
            tensor: The variable's name.
            otherwise: A tensor or array of the variable's shape: what is given where the other run's are not kept whole.
            join: Makes one array of the replicas'.
            of_sum: Makes it of their sum and number, where that alone is kept whole.

        Returns:
            What they made, of the dtype of `otherwise`.
        """

        def read(own: Array) -> Array:
            steps = self._next(optimizer, tensor)
            locals_ = [step.gradients[tensor] for step in steps if tensor in step.gradients]
            if locals_ and all(array.is_complete and array.shape == own.shape for array in locals_):
                return join([array.read() for array in locals_]).astype(own.dtype)
            sums = [step.sums[tensor].read() for step in steps if tensor in step.sums]
            if of_sum is None or len(sums) < len({step.host for step in steps}) or not sums:
                return own
            return of_sum(np.sum(sums, axis=0), len(locals_)).astype(own.dtype)

        if isinstance(otherwise, np.ndarray):
            return read(otherwise)
        with graph_functions.on_cpu():
            value = tf.numpy_function(read, [otherwise], otherwise.dtype)
        value.set_shape(otherwise.shape)
        return value

    def of_replica(self, optimizer: str, tensor: str, replica: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return what one replica had of a tensor in this step; zeros after the last one that was recorded.

        Args:
            optimizer: The optimizer's name.
            tensor: The variable's name.
            replica: The replica's number.
            shape: The variable's.
            dtype: The gradient's.

        Returns:
            A tensor. Of a gradient that is not kept whole the replica's part of the sum that its host has kept.
        """

        def read() -> Array:
            steps = self._next(optimizer, tensor, replica)
            own = next((step for step in steps if step.replica == replica), None)
            if own is None:
                return np.zeros(shape, dtype.as_numpy_dtype)
            if own.gradients[tensor].is_complete:
                return own.gradients[tensor].read().astype(dtype.as_numpy_dtype).reshape(shape)
            beside = [step for step in steps if step.host == own.host]
            (total,) = (step.sums[tensor].read() for step in beside if tensor in step.sums)
            return np.asarray(total / len(beside), dtype.as_numpy_dtype).reshape(shape)

        def given() -> Any:
            with graph_functions.on_cpu():
                value = tf.numpy_function(read, [], dtype)
            value.set_shape(shape)
            return value

        leaving = outlet()
        spec = tf.TensorSpec(shape, dtype)
        return given() if leaving is None else graph_functions.value_at_call(leaving.graph, given, spec)

    def _next(self, optimizer: str, tensor: str, replica: int = 0) -> list[Step]:
        with self._lock:
            number = self._calls[(optimizer, tensor, replica)]
            self._calls[(optimizer, tensor, replica)] += 1
        # A step may train a part of the variables: the shared ones and one of several heads.
        steps = [step for step in self._trace.steps(optimizer) if any(tensor in one.gradients for one in step.values())]
        return [step for _, step in sorted(steps[number].items())] if number < len(steps) else []


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
        return tf.reshape(value, [-1])

    @staticmethod
    def zeros(value: Any) -> Any:
        return tf.zeros_like(value)

    @staticmethod
    def like(value: Any, other: Any) -> Any:
        return tf.reshape(value, tf.shape(other))

    @staticmethod
    def cast(value: Any, dtype: Any) -> Any:
        return tf.cast(value, dtype)

    @staticmethod
    def repeated(steps: Array, like: Any) -> Any:
        return tf.gather(tf.constant(steps, like.dtype), tf.range(tf.size(like)) % len(steps))

    @staticmethod
    def scale(flat: Any) -> Any:
        """Return the root mean square of the finite elements."""
        finite = tf.where(tf.math.is_finite(flat), flat, tf.zeros_like(flat))
        return tf.sqrt(tf.reduce_mean(tf.square(finite)))


def _largest(locals_: list[Array]) -> Array:
    return np.asarray(np.max(np.abs(locals_), axis=0))


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

    def applied(self, optimizer: str, own: Pairs, recorded: Pairs, replica: int = 0) -> Pairs:
        """Return the gradients for an optimizer.

        Args:
            optimizer: The optimizer's name.
            own: Gradients and variables as the program has them.
            recorded: The same as they are recorded.
            replica: Whose they are.

        Returns:
            `recorded` where no run is followed.
        """
        if self._follow is None:
            return recorded
        given = [(self._given(self._follow, optimizer, gradient, variable, replica), variable) for gradient, variable in own]
        return self._rounding.changed(optimizer, given)

    @cached_property
    def _locals(self) -> LocalGradients:
        assert self._follow is not None
        return LocalGradients(self._follow.trace)

    def _given(self, follow: Follow, optimizer: str, gradient: Any, variable: Any, replica: int) -> Any:
        if gradient is None or "float" not in gradient.dtype.name:
            return gradient
        is_mean = optimizer in follow.averaged
        join = _mean if is_mean else _sum
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if is_sparse and np.prod(variable.shape) > _LARGE:
            return gradient
        if follow.each:
            place = (optimizer, self._names.of(variable), replica)
            of_replica = self._locals.of_replica(*place, tuple(variable.shape), gradient.dtype)
            return _with_total(gradient, of_replica, adds_rows=False) if is_sparse else of_replica
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


def _with_total(gradient: Any, whole: Any, *, adds_rows: bool = True) -> Any:
    """Return a sparse gradient with another total.

    It names the same rows, as often as before: some optimizers make another update of a row that comes twice. So its values are
    scaled first: what the factor leaves is divided evenly among them. Other rows are added unless the examples are the same.
    """
    size, indices = tf.shape(whole)[0], gradient.indices
    counts = tf.cast(tf.math.unsorted_segment_sum(tf.ones_like(indices), indices, size), whole.dtype)
    own = tf.math.unsorted_segment_sum(gradient.values, indices, size)
    values = gradient.values * tf.math.divide_no_nan(tf.reduce_sum(whole * own), tf.reduce_sum(own * own))
    change = whole - tf.math.unsorted_segment_sum(values, indices, size)
    shape = tf.concat([tf.shape(counts), tf.ones_like(tf.shape(whole)[1:])], 0)
    each = change / tf.reshape(tf.maximum(counts, 1), shape)
    values += tf.gather(each, indices)
    if not adds_rows:  # XLA does not compile a number of rows that depends on values
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    is_changed = tf.reduce_any(tf.reshape(change, [size, -1]) != 0, axis=1)
    missing = tf.cast(tf.reshape(tf.where(is_changed & (counts == 0)), [-1]), indices.dtype)
    values = tf.concat([values, tf.gather(change, missing)], 0)
    return tf.IndexedSlices(values, tf.concat([indices, missing], 0), gradient.dense_shape)


def _sum(locals_: list[Array]) -> Array:
    return np.asarray(np.sum(locals_, axis=0, dtype=_wide(locals_[0])))


def _mean(locals_: list[Array]) -> Array:
    return np.asarray(np.mean(locals_, axis=0, dtype=_wide(locals_[0])))


def _wide(array: Array) -> Any:
    """Return a wide enough dtype: sums in 16 bits would be rounded unlike in any all-reduce."""
    return np.promote_types(array.dtype, np.float32)
