"""What a table is filled from, as pieces of rows: arrays, memory maps, tensors, generators of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist_core.errors import WrongUse
from gpudist_core.values import in_type

Array = NDArray[Any]
Pieces = Iterator[tuple[int, Array]]
PIECE_BYTES = 2 << 20
"""What is on its way at once: large enough that copying is not held up, small beside any table that matters."""


@dataclass(frozen=True)
class Source:
    """A table's values before they are on a device.

    Attributes:
        shape: Of the whole table.
        dtype: The dtype the table will have.
        pieces: Gives (first row, values) of the rows in order, once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Callable[[], Pieces]


def source_of(values: Any, shape: Sequence[int] | None, dtype: Any, *, exact: bool = False) -> Source:
    """Make a source of what the user gave.

    Args:
        values: An array, a memory map, a tensor, nested lists; or an iterator of chunks of rows, or a function
            that returns one.
        shape: The shape of the whole table; needed for chunks.
        dtype: The dtype that the table is to have; that of the values, of chunks the first one's, where None.
        exact: Whether the dtype must hold the values; where nobody asked for it by name it must.

    Returns:
        The source.

    Raises:
        WrongUse: When shape or dtype do not fit.
    """
    if callable(values) and not hasattr(values, "__array__"):
        values = iter(values())
    if isinstance(values, Iterator):
        return _of_chunks(values, shape, dtype, exact or dtype is None)
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if shape is not None and tuple(shape) != array.shape:
        raise WrongUse("shape must be the values' own", "Leave it out.", shape=tuple(shape), values=array.shape)
    kind = numeric(dtype if dtype is not None else array.dtype)
    return Source(array.shape, kind, lambda: _rows(array, kind, exact))


def exactly(values: Any, dtype: np.dtype[Any]) -> Array:
    """Values as an array of a dtype.

    Args:
        values: What a user gave.
        dtype: The tensor's.

    Returns:
        The array.

    Raises:
        WrongUse: When the dtype does not hold them.
    """
    array = np.asarray(values)
    found: Array | None = in_type(array, dtype)
    if found is None:
        raise WrongUse(
            "A static tensor holds values of its dtype",
            "Give dtype=... where it is made.",
            dtype=dtype.name,
            values=array.dtype.name,
        )
    return found


def numeric(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of numbers; bfloat16 is known too.

    Args:
        dtype: A dtype of NumPy or TensorFlow, or its name.

    Returns:
        The dtype.

    Raises:
        WrongUse: When its values are not numbers.
    """
    import tensorflow as tf

    found: np.dtype[Any]
    try:
        found = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufV" or found.names:
        raise WrongUse("A static tensor must hold numbers", "Encode strings as numbers first.", dtype=str(dtype))
    return found


def rows_per_piece(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """How many rows of a table make a piece of about `PIECE_BYTES`."""
    return max(1, PIECE_BYTES // max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize))


def _rows(array: Array, dtype: np.dtype[Any], exact: bool) -> Pieces:
    take = exactly if exact else np.asarray
    if not array.ndim:
        yield 0, take(array, dtype)
        return
    each = rows_per_piece(array.shape, dtype)
    for start in range(0, len(array), each):
        yield start, take(array[start : start + each], dtype)


def _of_chunks(chunks: Iterator[Any], shape: Sequence[int] | None, dtype: Any, exact: bool) -> Source:
    if shape is None or not len(shape):
        raise WrongUse("A table that is filled from chunks needs its whole shape", "Give shape=(rows, ...).", shape=shape)
    whole = tuple(int(size) for size in shape)
    first = next(chunks, None)
    if first is None:
        first = np.zeros((0, *whole[1:]), np.float32)
    first = np.asarray(first)
    kind = numeric(dtype if dtype is not None else first.dtype)
    return Source(whole, kind, lambda: _checked(itertools.chain([first], chunks), whole, kind, exact))


def _checked(chunks: Iterable[Any], shape: tuple[int, ...], dtype: np.dtype[Any], exact: bool) -> Pieces:
    start = 0
    for chunk in chunks:
        array = np.asarray(chunk)
        if array.shape[1:] != shape[1:] or array.ndim != len(shape):
            raise WrongUse("A chunk must have the table's shape but for its rows", "Mend the generator.", **_both(array, shape))
        if start + len(array) > shape[0]:
            raise WrongUse(
                "Chunks must have as many rows as shape says", "They have more.", rows=start + len(array), shape=shape
            )
        for offset, piece in _rows(array, dtype, exact):
            yield start + offset, piece
        start += len(array)
    if start < shape[0]:
        raise WrongUse("Chunks must have as many rows as shape says", "They have fewer.", rows=start, shape=shape)


def _both(array: Array, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"chunk": array.shape, "shape": shape}
