"""Read the values of a table as pieces of rows: from arrays, memory maps, tensors or generators of chunks.

Initializers give a sharded table the same values on every topology: each row depends on its number only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gpudist_core.errors import UsageError, in_type

Array = NDArray[Any]
Pieces = Iterator[tuple[int, Array]]
PIECE_BYTES = 2 << 20
"""Bytes in transit at once: enough to copy at full speed, little beside any table that matters."""


@dataclass(frozen=True)
class Source:
    """Hold a table's values before they are on a device.

    Attributes:
        shape: The shape of the whole table.
        dtype: The dtype that the table will have.
        pieces: A function that yields (first row, values) in order, once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Callable[[], Pieces]


def source_of(values: Any, shape: Sequence[int] | None, dtype: Any, *, exact: bool = False) -> Source:
    """Make a source from a user's values.

    Args:
        values: An array, a memory map, a tensor or nested lists; or an iterator of chunks of rows, or a function that returns
            one.
        shape: The shape of the whole table. Needed for chunks.
        dtype: The dtype of the table. Default: the dtype of the values, or of the first chunk.
        exact: Whether the dtype must hold the values exactly. This is required if nobody named the dtype.

    Returns:
        The source.

    Raises:
        UsageError: If shape or dtype do not match.
    """
    if callable(values) and not hasattr(values, "__array__"):
        values = iter(values())
    if isinstance(values, Iterator):
        return _of_chunks(values, shape, dtype, exact or dtype is None)
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if shape is not None and tuple(shape) != array.shape:
        raise UsageError("shape must be the shape of the values", "Leave it out.", shape=tuple(shape), values=array.shape)
    kind = numeric(dtype if dtype is not None else array.dtype)
    return Source(array.shape, kind, lambda: _rows(array, kind, exact))


def exactly(values: Any, dtype: np.dtype[Any]) -> Array:
    """Convert values to an array of a dtype.

    Args:
        values: A user's values.
        dtype: The tensor's dtype.

    Returns:
        The array.

    Raises:
        UsageError: If the dtype cannot hold the values.
    """
    array = np.asarray(values)
    converted: Array | None = in_type(array, dtype)
    if converted is None:
        raise UsageError(
            "The dtype of a static tensor must be able to hold its values",
            "Give dtype=... where you make the tensor.",
            dtype=dtype.name,
            values=array.dtype.name,
        )
    return converted


def numeric(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of numbers, including bfloat16.

    Args:
        dtype: A NumPy or TensorFlow dtype, or its name.

    Returns:
        The dtype.

    Raises:
        UsageError: If its values are not numbers.
    """
    kind: np.dtype[Any]
    try:
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "biufV" or kind.names:
        raise UsageError("A static tensor must hold numbers", "Encode strings as numbers first.", dtype=str(dtype))
    return kind


def rows_per_piece(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the number of rows in a piece of about `PIECE_BYTES`."""
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
        raise UsageError("A table from chunks needs its whole shape", "Give shape=(rows, ...).", shape=shape)
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
            raise UsageError(
                "A chunk must have the table's shape, except for the number of rows",
                "Fix the generator.",
                chunk=array.shape,
                shape=shape,
            )
        if start + len(array) > shape[0]:
            raise UsageError(
                "The chunks must have as many rows as shape says",
                "The chunks have more rows.",
                rows=start + len(array),
                shape=shape,
            )
        for offset, piece in _rows(array, dtype, exact):
            yield start + offset, piece
        start += len(array)
    if start < shape[0]:
        raise UsageError(
            "The chunks must have as many rows as shape says", "The chunks have fewer rows.", rows=start, shape=shape
        )


Initializer = Callable[[int, tuple[int, ...]], Any]
"""A function (start, (count, *rest)) -> values of `count` rows from `start` on."""

_PAGE = 1024
"""Rows that share a generator: enough to be fast, few enough to draw little more than a slice needs."""


def uniform(low: float = -0.05, high: float = 0.05, seed: int = 0) -> Callable[[int, tuple[int, ...]], NDArray[Any]]:
    """Return an initializer of uniform random rows for `shard`. The defaults are Keras's defaults for embeddings.

    Args:
        low: The smallest value.
        high: The exclusive upper bound.
        seed: The seed. Each seed gives other values.

    Returns:
        A function of (start, (count, *rest)) that returns float32 values of shape (count, *rest).

    Example:
        >>> rows = uniform(seed=1)
        >>> bool((rows(0, (5, 2))[3:] == rows(3, (2, 2))).all())
        True
    """

    def rows(start: int, shape: tuple[int, ...]) -> NDArray[Any]:
        count, *rest = shape
        first, last = start // _PAGE, -(-(start + count) // _PAGE)
        drawn = np.empty(((last - first) * _PAGE, *rest), np.float32)
        for page in range(first, last):
            at = (page - first) * _PAGE
            np.random.Generator(np.random.Philox(key=[seed, page])).random(out=drawn[at : at + _PAGE], dtype=np.float32)
        drawn *= high - low
        drawn += low
        offset = start - first * _PAGE
        return drawn[offset : offset + count]

    return rows


def check_initializer(initializer: Any) -> None:
    """Refuse an initializer that does not make rows by their numbers, such as a Keras initializer.

    Args:
        initializer: The `initializer` argument.

    Raises:
        UsageError: If it is not such a function.
    """
    keras = sys.modules.get("keras")
    of_keras = keras is not None and isinstance(initializer, keras.initializers.Initializer)
    if of_keras or not callable(initializer):
        raise UsageError(
            "A table's initializer must be a function of (start, (count, ...)) that returns those rows and depends on their "
            "numbers only, so that each device can make its own slice",
            "Use gpudist_core.static.uniform(low, high, seed), or write such a function. Keras initializers draw the whole "
            "table.",
            initializer=type(initializer).__name__ if of_keras else initializer,
        )
