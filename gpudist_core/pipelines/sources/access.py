"""What every source of rows offers, and what the sources share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.hashing import Integers
from gpudist_core.values import in_type

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
    return tf.TensorSpec(array.shape, type_of(array))


def type_of(array: Any) -> Any:
    """The `tf.DType` of an array's elements.

    Args:
        array: Of numbers or strings.

    Returns:
        The data type.

    Raises:
        WrongUse: Its elements are something else.
    """
    import tensorflow as tf

    first = array.reshape(-1)[0] if array.dtype.kind == "O" and array.size else ""
    try:
        if isinstance(first, (str, bytes)):
            return tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
        told = type(first).__name__
    except TypeError:  # times, records
        told = str(array.dtype)
    raise WrongUse("An array holds numbers or strings", "Make arrays of numbers of the objects.", first=told)


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
        WrongUse: Two rows have different shapes, or a value that the data type does not hold.
    """
    parts = []
    for position, spec in enumerate(specs):
        kind = numpy_type(spec)
        column = [np.asarray(row[position], object if kind is object else None) for row in rows]
        shapes = {value.shape for value in column}
        if len(shapes) > 1 or not all(spec.shape.is_compatible_with(shape) for shape in shapes):
            raise WrongUse(
                "All rows have the same shape before they are batched",
                "Bring them to one shape where they are read.",
                component=position,
                shapes=sorted(shapes),
                signature=tuple(spec.shape),
            )
        empty = np.zeros((0, *(size or 0 for size in spec.shape)), kind)
        parts.append(all_in_type(np.stack(column), kind, position) if column else empty)
    return parts


def all_in_type(values: Any, kind: Any, position: int) -> Any:
    """Values in the data type of the first row, or of the signature: a whole number cannot hold 0.5, nor int8 300.

    Args:
        values: An array.
        kind: The NumPy data type that they must have; `object` for strings.
        position: The component, for the message.

    Returns:
        The array in that type.

    Raises:
        WrongUse: A value is another one in that type.
    """
    found = in_type(values, kind)
    if found is None:
        raise WrongUse(
            "All rows have the data type of the signature, or of the first row where there is none",
            "Say signature=..., with a type for all values, or make the rows of one type: 0.0 instead of 0.",
            component=position,
            signature="string" if kind is object else _name(np.dtype(kind)),
            found=_name(values.dtype),
        )
    return found


def _name(kind: np.dtype[Any]) -> str:
    names: dict[str, str] = {"O": "objects", "S": "string", "U": "string"}
    return names.get(kind.kind, str(kind.name))


def numpy_type(spec: Any) -> Any:
    """The NumPy data type of a component; `object` for strings."""
    return spec.dtype.as_numpy_dtype
