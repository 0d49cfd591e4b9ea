"""Define the interface of every source of examples, and helpers that the sources share.

Arrays in memory, or mapped from a file, are the first of them. Only the requested examples are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError, in_type
from gpudist_core.pipelines.hashing import Integers

# The components of a structure, flattened, each an array or a tensor with the rows along its first axis.
Rows: TypeAlias = list[Any]


class _Source(Protocol):
    """Provide examples.

    Attributes:
        spec: The structure of one example, a `tf.TensorSpec` for each component.
        fingerprint: A fingerprint of these examples, equal on every machine.
        looks: The text that hosts compare before they start: a few places of the data that each was given.
    """

    spec: Any
    fingerprint: str
    looks: str


class RowSource(_Source, Protocol):
    """Provide examples in any order.

    Attributes:
        num_rows: The number of examples.
    """

    num_rows: int

    def take(self, rows: Integers) -> Rows:
        """Return the examples with these numbers. Several threads may call it at once."""


class StreamSource(_Source, Protocol):
    """Provide examples one after the other.

    Attributes:
        num_rows: The number of examples, or None if it is unknown.
    """

    num_rows: int | None

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        """Yield all examples once, in chunks of at most `size`, each with the numbers of its examples before its components.

        An example has the same number in each epoch, whatever its place. A seed of None keeps the order.
        """

    def keeping(self) -> StreamSource:
        """Return the same examples, kept in memory after the first read."""


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


def evenly(count: int) -> list[int]:
    """Return at most 16 evenly spaced numbers below a count, with the first and the last: enough to tell data sets apart."""
    return sorted({int(place) for place in np.linspace(0, count - 1, 16)})


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


class ArraySource:
    """Provide the examples of a structure of arrays.

    Args:
        arrays: Arrays or tensors with equal first axes, in any structure.

    Attributes:
        parts: The arrays, flattened.

    Raises:
        UsageError: If there is no example, an array has no first axis or holds objects, or arrays differ in their number of
            examples.
    """

    def __init__(self, arrays: Any) -> None:
        flat = tf.nest.flatten(arrays)
        # np.asanyarray keeps a memory map a memory map; a tensor on the CPU becomes an array over the same memory.
        self.parts = [np.asanyarray(array) for array in flat]
        shapes = [part.shape for part in self.parts]
        if not shapes or not all(shapes):
            raise UsageError(
                "Each array must have its examples along the first axis",
                "Pass arrays, in tuples or dicts but not in lists.",
                shapes=shapes,
            )
        if len({shape[0] for shape in shapes}) > 1:
            raise UsageError("All arrays must have the same number of examples", "Cut them to the same length.", shapes=shapes)
        self.num_rows = int(shapes[0][0])
        if self.num_rows == 0:
            raise UsageError("The data must have at least one example", "Pass arrays with examples.", shapes=shapes)
        self.spec = tf.nest.pack_sequence_as(arrays, [tf.TensorSpec(part.shape[1:], type_of(part)) for part in self.parts])

    def take(self, rows: Integers) -> Rows:
        """Return the examples with these numbers. Consecutive ones are not copied."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            return [np.asarray(part[rows[0] : rows[-1] + 1]) for part in self.parts]
        return [np.asarray(np.take(part, rows, axis=0)) for part in self.parts]

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples."""
        return digest(*((part.shape, part.dtype.str) for part in self.parts), *map(_content, self._sampled()))

    @cached_property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: shapes, and the values of a few examples, without floats."""
        content = [_content(part) for part in self._sampled() if part.dtype.kind not in "fc"]
        forms = ", ".join(f"{part.dtype}{list(part.shape)}" for part in self.parts)
        return f"{forms}: {digest(*content)[:8]}" if content else forms

    @cached_property
    def numbers(self) -> list[float]:
        """Return numbers for a few examples of floats.

        Hosts compare them up to rounding, as each may have computed them itself.
        """
        return [number for part in self._sampled() if part.dtype.kind in "fc" for number in _sums(part)]

    def _sampled(self) -> Rows:
        rows = np.asarray(evenly(self.num_rows))
        return [np.ascontiguousarray(np.take(part, rows, axis=0)) for part in self.parts]


def _content(part: Any) -> str | bytes:
    return repr(part.tolist()) if part.dtype.kind == "O" else part.tobytes()


def _sums(part: Any) -> list[float]:
    """Return, for each example, a sum with random signs, scaled to about 1; and the logarithm of the scale."""
    rows = np.nan_to_num(part.reshape(len(part), -1).real.astype(np.float64), nan=0.5, posinf=2.0, neginf=-2.0)
    size = float(np.sqrt(np.mean(np.square(rows)))) if rows.size else 0.0
    if size == 0.0:
        return [0.0] * (len(rows) + 1)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], rows.shape[1])
    return [float(np.log(size)), *(rows @ signs / (size * np.sqrt(rows.shape[1]))).tolist()]
