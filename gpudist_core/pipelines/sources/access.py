"""Define the interface of every source of examples, and helpers that the sources share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError, in_type
from gpudist_core.pipelines.hashing import Integers

# The components of a structure, flattened, each an array or a tensor with the rows along its first axis.
Rows: TypeAlias = list[Any]


class RowSource(Protocol):
    """Provide examples in any order."""

    @property
    def spec(self) -> Any:
        """Return the structure of one example, a `tf.TensorSpec` for each component."""

    @property
    def num_rows(self) -> int:
        """Return the number of examples."""

    def take(self, rows: Integers) -> Rows:
        """Return the examples with these numbers. Several threads may call it at once."""

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples, equal on every machine."""

    @property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: a few places of the data that each was given."""


class StreamSource(Protocol):
    """Provide examples one after the other."""

    @property
    def spec(self) -> Any:
        """Return the structure of one example, a `tf.TensorSpec` for each component."""

    @property
    def num_rows(self) -> int | None:
        """Return the number of examples, or None if it is unknown."""

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        """Yield all examples once, in chunks of at most `size`, each with the numbers of its examples before its components.

        An example has the same number in each epoch, whatever its place. A seed of None keeps the order.
        """

    def keeping(self) -> StreamSource:
        """Return the same examples, kept in memory after the first read."""

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples, equal on every machine."""

    @property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: a few places of the data that each was given."""


def spec_of(value: Any) -> Any:
    """Return the `tf.TensorSpec` of an array or a scalar."""
    array = np.asarray(value)
    return tf.TensorSpec(array.shape, type_of(array))


def type_of(array: Any) -> Any:
    """Return the `tf.DType` of an array's elements.

    Args:
        array: An array of numbers or strings.

    Returns:
        The dtype.

    Raises:
        UsageError: If its elements are neither.
    """
    first = array.reshape(-1)[0] if array.dtype.kind == "O" and array.size else ""
    try:
        if isinstance(first, (str, bytes)):
            return tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
        received = type(first).__name__
    except TypeError:  # times, records
        received = str(array.dtype)
    raise UsageError("An array must hold numbers or strings", "Convert the objects to arrays of numbers.", first=received)


def digest(*parts: Any) -> str:
    """Return a short hash of these parts: bytes as they are, anything else by its repr."""
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def evenly(count: int, most: int = 16) -> list[int]:
    """Return a few evenly spaced numbers below a count, as a cheap sample of a data set.

    Args:
        count: The count.
        most: The largest number of samples.

    Returns:
        The numbers, including the first and the last.
    """
    return sorted({int(place) for place in np.linspace(0, count - 1, most)})


def stacked(rows: Sequence[Rows], specs: Sequence[Any]) -> Rows:
    """Stack single examples to one array for each component.

    Args:
        rows: The flattened examples.
        specs: The `tf.TensorSpec` of each component.

    Returns:
        The arrays, with the dtypes of the specs.

    Raises:
        UsageError: If examples have different shapes, or a dtype cannot hold a value.
    """
    parts = []
    for position, spec in enumerate(specs):
        kind = numpy_type(spec)
        column = [np.asarray(row[position], object if kind is object else None) for row in rows]
        shapes = {value.shape for value in column}
        if len(shapes) > 1 or not all(spec.shape.is_compatible_with(shape) for shape in shapes):
            raise UsageError(
                "All examples must have the same shape before they are batched",
                "Bring them to one shape where they are read.",
                component=position,
                shapes=sorted(shapes),
                signature=tuple(spec.shape),
            )
        empty = np.zeros((0, *(size or 0 for size in spec.shape)), kind)
        parts.append(all_in_type(np.stack(column), kind, position) if column else empty)
    return parts


def all_in_type(values: Any, kind: Any, position: int) -> Any:
    """Convert values to the dtype of the first example, or of the signature.

    An integer dtype cannot hold 0.5, and int8 cannot hold 300.

    Args:
        values: An array.
        kind: The required NumPy dtype; `object` for strings.
        position: The component, for the message.

    Returns:
        The array in that dtype.

    Raises:
        UsageError: If the dtype cannot hold a value.
    """
    converted = in_type(values, kind)
    if converted is None:
        raise UsageError(
            "All examples must fit the dtype of the signature, or of the first example if there is no signature",
            "Pass signature=... with a dtype for all values, or use one type in all examples: 0.0 instead of 0.",
            component=position,
            signature="string" if kind is object else _name(np.dtype(kind)),
            found=_name(values.dtype),
        )
    return converted


def _name(kind: np.dtype[Any]) -> str:
    names: dict[str, str] = {"O": "objects", "S": "string", "U": "string"}
    return names.get(kind.kind, str(kind.name))


def numpy_type(spec: Any) -> Any:
    """Return the NumPy dtype of a component; `object` for strings."""
    return spec.dtype.as_numpy_dtype
