"""What every source of rows offers, and what the sources share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.hashing import Integers

# The components of a structure, flattened, each an array or a tensor with the rows along its first axis.
Rows: TypeAlias = list[Any]


class RowSource(Protocol):
    """Rows that can be had in any order."""

    @property
    def spec(self) -> Any:
        """The structure of one row, a `tf.TensorSpec` for each component."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def take(self, rows: Integers) -> Rows:
        """The rows of these numbers; may be called by several threads at once."""

    @property
    def fingerprint(self) -> str:
        """What tells these rows from others, whatever the machine."""

    @property
    def looks(self) -> str:
        """What hosts compare before they begin, in words: of what each was given itself, a few places."""


class StreamSource(Protocol):
    """Rows that come one after the other."""

    @property
    def spec(self) -> Any:
        """The structure of one row, a `tf.TensorSpec` for each component."""

    @property
    def num_rows(self) -> int | None:
        """How many there are, if that is known."""

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        """All rows once, in chunks of at most `size`, each with the numbers of its rows before its components.

        A row has the same number in each epoch, whatever its place; the seed is None where the order is to stay.
        """

    def keeping(self) -> StreamSource:
        """The same rows, kept in memory when they have been read once."""

    @property
    def fingerprint(self) -> str:
        """What tells these rows from others, whatever the machine."""

    @property
    def looks(self) -> str:
        """What hosts compare before they begin, in words: of what each was given itself, a few places."""


def spec_of(value: Any) -> Any:
    """The `tf.TensorSpec` of an array or a scalar."""
    import tensorflow as tf

    array = np.asarray(value)
    return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype))


def digest(*parts: Any) -> str:
    """A short name for these parts: bytes as they are, anything else as it prints."""
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def evenly(count: int, most: int = 16) -> list[int]:
    """A few numbers below a count: what stands there tells one data set from another, and costs nothing.

    Args:
        count: How many there are.
        most: How many are wanted.

    Returns:
        The numbers, the first and the last among them.
    """
    return sorted({int(place) for place in np.linspace(0, count - 1, most)})


def stacked(rows: Sequence[Rows], specs: Sequence[Any]) -> Rows:
    """Rows, one by one, as one array for each component.

    Args:
        rows: The flattened rows.
        specs: The `tf.TensorSpec` of each component.

    Returns:
        The arrays, with the data types of the specs.

    Raises:
        WrongUse: Two rows have different shapes.
    """
    parts = []
    for position, spec in enumerate(specs):
        column = [np.asarray(row[position], _numpy_type(spec)) for row in rows]
        shapes = {value.shape for value in column}
        if len(shapes) > 1 or not all(spec.shape.is_compatible_with(shape) for shape in shapes):
            raise WrongUse(
                "All rows have the same shape before they are batched",
                "Bring them to one shape where they are read.",
                component=position,
                shapes=sorted(shapes),
                signature=tuple(spec.shape),
            )
        parts.append(np.stack(column) if column else np.zeros((0, *(size or 0 for size in spec.shape)), _numpy_type(spec)))
    return parts


def _numpy_type(spec: Any) -> Any:
    return spec.dtype.as_numpy_dtype
