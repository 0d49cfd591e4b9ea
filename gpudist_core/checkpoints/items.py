"""Define the items of a checkpoint: each knows which rows this host writes, which it reads, and how it restores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError

Array = np.ndarray[Any, Any]
Read = Callable[[int, int], Array]


class Item(Protocol):
    """Define one value of a checkpoint.

    Attributes:
        name: A unique name, equal in every run.
        shape: The shape of the whole value.
        dtype: The name of the dtype.
        axis: None for a value that the first host writes alone; otherwise the axis whose rows the hosts share.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None

    def pieces(self) -> list[tuple[int, int, Array]]:
        """Return what this host writes: the first row, the row after the last, and a copy of the values.

        All hosts must call it at the same step, in the same order: some values need a sum over the hosts.
        """

    def wanted(self, rows: int) -> list[tuple[int, int]]:
        """Return which rows this host needs of a saved value with `rows` rows."""

    def assign(self, read: Read, rows: int) -> None:
        """Restore the values."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a saved value of that shape can be restored."""


class _OfOneForm:
    """Fit saved values of the same shape alone, and read all of them."""

    shape: tuple[int, ...]

    def wanted(self, rows: int) -> list[tuple[int, int]]:
        return [(0, rows)]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape


class Whole(_OfOneForm):
    """Save a value that is equal on all replicas, or of which replicas hold parts of a sum or a mean.

    Args:
        name: Its name.
        variable: A `tf.Variable`, distributed or not.
        copies: Its copies on this host's replicas.
        is_first_host: Whether this host writes it and gets the total of a sum.
    """

    axis: int | None = None

    def __init__(self, name: str, variable: Any, copies: Sequence[Any], is_first_host: bool) -> None:
        self.name, self._variable, self._copies, self._is_first_host = name, variable, copies, is_first_host
        self.shape, self.dtype = tuple(copies[0].shape), copies[0].dtype.name
        self._aggregation = aggregation_on_read(variable)

    def pieces(self) -> list[tuple[int, int, Array]]:
        if self._aggregation in ("SUM", "MEAN"):
            value = self._variable.read_value().numpy()
        elif self._is_first_host:
            value = self._copies[0].numpy()
        else:
            return []
        return [(0, 0, np.asarray(value))] if self._is_first_host else []

    def assign(self, read: Read, rows: int) -> None:
        value = read(0, rows)
        for i, copy in enumerate(self._copies):
            total_is_elsewhere = self._aggregation == "SUM" and not (self._is_first_host and i == 0)
            put(copy, np.zeros_like(value) if total_is_elsewhere else value)


class PerReplica:
    """Save a separate value for each replica: the position of a random generator, a variable that is never aggregated.

    If the number of replicas changes, additional replicas get the first one's value.

    Args:
        name: Its name.
        copies: The variables of this host's replicas.
        first: The number of the first of them.
        total: Number of replicas on all hosts.
        writes: Whether this host writes them. If all share one value, only the first host does.
    """

    axis: int | None = 0

    def __init__(self, name: str, copies: Sequence[Any], first: int, total: int, writes: bool = True) -> None:
        self.name, self._copies, self._first, self._writes = name, copies, first, writes
        self.shape, self.dtype = (total, *copies[0].shape), copies[0].dtype.name

    def pieces(self) -> list[tuple[int, int, Array]]:
        if not self._writes:
            return []
        values = np.stack([copy.numpy() for copy in self._copies])
        return [(self._first, self._first + len(values), values)]

    def wanted(self, rows: int) -> list[tuple[int, int]]:
        return [(row, row + 1) for row in (self._row(i, rows) for i in range(len(self._copies)))]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 0 and shape[0] > 0 and shape[1:] == self.shape[1:]

    def assign(self, read: Read, rows: int) -> None:
        for i, copy in enumerate(self._copies):
            row = self._row(i, rows)
            put(copy, read(row, row + 1)[0])

    def _row(self, i: int, rows: int) -> int:
        return self._first + i if self._first + i < rows else 0


class Sliced(_OfOneForm):
    """Save a table of which each replica holds a slice, or an optimizer's slot of such a table.

    Args:
        name: Its name.
        copies: The slices of this host's replicas, all of the same height.
        first: The number of the first of these replicas.
        info: How the table is split over the replicas.
    """

    def __init__(self, name: str, copies: Sequence[Any], first: int, info: Any) -> None:
        shape = tuple(copies[0].shape)
        self.name, self._copies, self._first, self._info = name, copies, first, info
        self.axis: int | None = int(info.axis)
        self.shape, self.dtype = (*shape[: info.axis], int(info.rows), *shape[info.axis + 1 :]), copies[0].dtype.name

    def pieces(self) -> list[tuple[int, int, Array]]:
        spans = [self._info.span(self._first + i) for i in range(len(self._copies))]
        return [
            (start, stop, copy.numpy()[self._rows(0, stop - start)])
            for (start, stop), copy in zip(spans, self._copies, strict=True)
            if stop > start
        ]

    def wanted(self, rows: int) -> list[tuple[int, int]]:
        spans = [self._info.span(self._first + i) for i in range(len(self._copies))]
        return [(start, stop) for start, stop in spans if stop > start]

    def assign(self, read: Read, rows: int) -> None:
        for i, copy in enumerate(self._copies):
            start, stop = self._info.span(self._first + i)
            value = np.zeros(copy.shape, copy.dtype.as_numpy_dtype)  # what lies below the last row is never read
            if stop > start:
                value[self._rows(0, stop - start)] = read(start, stop)
            put(copy, value)

    def _rows(self, start: int, stop: int) -> tuple[slice, ...]:
        return (*[slice(None)] * self._info.axis, slice(start, stop))


class Constant(_OfOneForm):
    """Save an array that an object returned from `state()`. The object restores it itself."""

    axis: int | None = None

    def __init__(self, name: str, value: Array, is_first_host: bool) -> None:
        self.name, self._value, self._is_first_host = name, value, is_first_host
        self.shape = tuple(value.shape)
        self.dtype = value.dtype.name

    def pieces(self) -> list[tuple[int, int, Array]]:
        return [(0, 0, np.array(self._value))] if self._is_first_host else []

    def assign(self, read: Read, rows: int) -> None:
        """Do nothing: the object's own `restore` does it."""


def aggregation_on_read(variable: Any) -> str | None:
    """Return how the replicas' values of a variable are aggregated; None if all are equal."""
    if getattr(getattr(variable, "synchronization", None), "name", "") != "ON_READ":
        return None
    return str(variable.aggregation.name)


def put(copy: Any, value: Array) -> None:
    """Set one replica's variable, on its own device."""
    with tf.device(copy.device):
        copy.assign(tf.constant(value, dtype=copy.dtype))


def check_kept(name: str, dtype: Any) -> None:
    """Refuse a variable without numbers.

    Args:
        name: The variable's name.
        dtype: Its `tf.DType`.

    Raises:
        UsageError: For strings and handles.
    """
    if dtype.name in ("string", "resource", "variant"):
        raise UsageError(
            "Only numeric variables can be saved in a checkpoint", "Leave this one out.", variable=name, dtype=dtype.name
        )
