"""Find the inputs that hold the examples of a batch, and give each example its identity: a digest of its content."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = tuple[Any, ...]
Array = NDArray[Any]
Input = dict[str, Any]
K = TypeVar("K")


def row_positions(numbers: Mapping[int, int | None]) -> list[int]:
    """Return which inputs hold examples: those with the most frequent leading dimension, the first of equals."""
    counts = Counter(number for number in numbers.values() if number is not None)
    if not counts:
        return []
    most = counts.most_common(1)[0][0]
    return [position for position, number in sorted(numbers.items()) if number == most]


def entries_of_examples(shares: Sequence[Mapping[K, Any]], counts: Sequence[int], is_same: Callable[[K], bool]) -> dict[K, int]:
    """Return which inputs have entries for each example, and how many: unlabelled rows come in larger batches than labelled.

    Args:
        shares: Of each share the inputs, as anything with a shape.
        counts: Of each share the number of examples.
        is_same: Whether an input is the same on all shares: then it has several entries for each example by chance alone.

    Returns:
        The number by input, at least 1.
    """
    found = {}
    for key in shares[0]:
        shapes = [share[key].shape for share in shares if key in share]
        if len(shapes) < len(shares) or not all(shapes) or 0 in counts:
            continue
        times = {shape[0] / count for shape, count in zip(shapes, counts, strict=True)}
        if times == {1.0} or (len(times) == 1 and min(times) >= 1 and min(times).is_integer() and not is_same(key)):
            found[key] = int(min(times))
    return found


def parts_of(values: Mapping[Key, Array]) -> list[Input]:
    """Return the inputs of a run in order: dense, sparse (indices, values, shape) or ragged (values, splits)."""
    parts: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        part = parts.setdefault(key[1], {})
        if key[2] == "splits":
            part.setdefault("splits", []).append(value)
        else:
            part[key[2]] = value
    return [parts[position] for position in sorted(parts)]


def num_rows(part: Input) -> int | None:
    """Return the leading dimension of an input, None for a scalar."""
    if "splits" in part:
        return len(part["splits"][0]) - 1
    if "indices" in part:
        return int(part["shape"][0])
    dense = part["dense"]
    return int(dense.shape[0]) if dense.ndim else None


def joined(arrays: Sequence[Array], missing: float = 0) -> Array:
    """Return the rows of several arrays as one, filled up to the widest as `padded_batch` does.

    Args:
        arrays: Rows of one input, at least one array. Each may have rows of another width.
        missing: What numbers are filled up with.

    Returns:
        All rows, in this order.
    """
    widths = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    if all(list(array.shape[1:]) == widths for array in arrays):
        return np.concatenate(arrays)
    fill: Any = b"" if arrays[0].dtype == object else missing
    widths_missing = [
        [(0, 0), *((0, wide - size) for wide, size in zip(widths, array.shape[1:], strict=True))] for array in arrays
    ]
    return np.concatenate([np.pad(array, pad, constant_values=fill) for array, pad in zip(arrays, widths_missing, strict=True)])


def row_names(parts: list[Input]) -> list[str]:
    """Return the identity of each example: a digest of its part of all inputs."""
    number = num_rows(parts[0]) if parts else 0
    names = []
    for i in range(number or 0):
        state = hashlib.blake2b(digest_size=8)
        for piece in (_row_bytes(part, i) for part in parts):
            state.update(len(piece).to_bytes(8, "little"))
            state.update(piece)
        names.append(state.hexdigest())
    return names


def _row_bytes(part: Input, i: int) -> bytes:
    if "splits" in part:
        low, high = i, i + 1
        pieces = []
        for splits in part["splits"]:
            pieces.append((splits[low : high + 1] - splits[low]).tobytes())
            low, high = int(splits[low]), int(splits[high])
        return b"".join([*pieces, _bytes(part["values"][low:high])])
    if "indices" in part:
        chosen = part["indices"][:, 0] == i
        return bytes(part["indices"][chosen, 1:].tobytes() + _bytes(part["values"][chosen]))
    # Padding at the end says nothing: `padded_batch` of a host fills its rows up to the longest of them, as one device does
    # to the longest of all. A slice, because a string of a row is no array by itself.
    return _bytes(part["dense"][i : i + 1]).rstrip(b"\0")


def _bytes(array: Array) -> bytes:
    if array.dtype == object:
        return b"\0".join(bytes(item) if isinstance(item, bytes) else str(item).encode() for item in np.ravel(array))
    return np.ascontiguousarray(array).tobytes()
