"""Record variables of which each replica holds a slice as parts of a table, and compare them as the table.

gpudist_core knows such variables, and the `axis`, `rows` and `total_replicas` of each: replica r holds the rows from r *
ceil(rows / total_replicas) on, and what is beyond the last row is padding. Its local gradient is the total of its slice. A part
is written like a sparse gradient: some rows, the axis first, with their numbers in the table. A table in one piece
(`total_replicas` is 1) is one for all replicas, each with its part of the gradient, as of any variable.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from emulate.probe import upstream
from gpudist_core.state import of_variable

if TYPE_CHECKING:
    from emulate.probe.trace import StoredArray, Variable

Array = NDArray[Any]
Key = TypeVar("Key", bound=Hashable)


class Shard(NamedTuple):
    """Describe how a table is split over the replicas."""

    axis: int
    rows: int
    total_replicas: int

    def span(self, replica: int) -> tuple[int, int]:
        """Return the rows of a replica: the first, and the first after the last."""
        if self.total_replicas == 1:
            return 0, self.rows
        height = -(-self.rows // self.total_replicas)
        return min(self.rows, replica * height), min(self.rows, (replica + 1) * height)


def shard_of(variable: Any) -> Shard | None:
    """Return a variable's shard, None for a whole variable."""
    entry = of_variable.known(upstream.tf_variable(variable))
    return None if entry is None else Shard(entry.shard.axis, entry.shard.rows, entry.shard.total_replicas)


class Part(NamedTuple):
    """Hold what is kept of one replica's slice.

    Attributes:
        values: Some of its rows, the axis first.
        rows: Their numbers, of the table of which every `every`-th row is kept.
        shape: That table's shape.
        every: Which rows are kept: the same on every topology.
    """

    values: Array
    rows: Array
    shape: tuple[int, ...]
    every: int

    def entry(self, shard: Shard) -> dict[str, Any]:
        """Return the fields of an event besides the array."""
        return {"shape": list(self.shape), "slice": {"of": shard.total_replicas, "every": self.every}}


def part_of(value: Array, shard: Shard, replica: int, most: int, rows: Array | None = None) -> Part:
    """Return a replica's slice without its padding, as a part of the table.

    Args:
        value: The slice, or the values of some of its rows.
        shard: How the table is split.
        replica: The replica's number.
        most: About how many elements of the whole table to keep at the most.
        rows: For a sparse gradient the numbers of the rows in the slice, unique and sorted.

    Returns:
        The part.
    """
    start, stop = shard.span(replica)
    first = np.moveaxis(value, shard.axis, 0)
    numbers = start + (np.arange(stop - start) if rows is None else rows)
    first = first[: len(numbers)]
    every = max(1, math.ceil(shard.rows * math.prod(first.shape[1:]) / most))
    mask = (numbers < stop) & (numbers % every == 0)
    shape = (-(-shard.rows // every), *first.shape[1:])
    return Part(np.ascontiguousarray(first[mask]), (numbers[mask] // every).astype(np.int64), shape, every)


def local_slice(table: Array, shard: Shard, replica: int) -> Array:
    """Return a replica's slice of a table with the split axis first, padded with zeros."""
    start, stop = shard.span(replica)
    height = -(-shard.rows // shard.total_replicas)
    padded = np.pad(table[start:stop], [(0, height - (stop - start)), *([(0, 0)] * (table.ndim - 1))])
    return np.moveaxis(padded, 0, shard.axis)


def with_tables(variables: Mapping[Key, Mapping[str, Variable]]) -> dict[Key, dict[str, Variable]]:
    """Return every replica's variables, with whole tables in place of slices. Incomplete tables are left out.

    Args:
        variables: By replica, in the order of the replicas.

    Returns:
        The same with one value for each table, which all replicas have.
    """
    whole = {key: dict(values) for key, values in variables.items()}
    for name in dict.fromkeys(name for values in whole.values() for name, v in values.items() if _is_slice(v.array)):
        parts = {key: v[name] for key, v in whole.items() if name in v and _is_slice(v[name].array)}
        for group in _tables({key: part.array for key, part in parts.items() if part.array is not None}):
            table = assembled([array for key in group if (array := parts[key].array) is not None])
            digest = hashlib.blake2b("".join(parts[key].digest for key in group).encode(), digest_size=8).hexdigest()
            for key in group:
                whole[key].pop(name)
                if table is not None:
                    whole[key][name] = replace(parts[group[0]], digest=digest, array=table)
    return whole


def _tables(parts: Mapping[Key, StoredArray]) -> list[list[Key]]:
    """Return which replicas' parts make up a table: all of them, or each alone if it is in one piece."""
    in_one_piece = any(part.slices == 1 for part in parts.values())
    return [[key] for key in parts] if in_one_piece else [list(parts)]


def with_gradients(gradients: Mapping[Key, Mapping[str, StoredArray]]) -> dict[Key, dict[str, StoredArray]]:
    """Return every replica's gradients. That of a table in slices is on the first replica only, because it is the sum.

    Args:
        gradients: By replica, in the order of the replicas.

    Returns:
        The same without slices.
    """
    whole = {key: dict(values) for key, values in gradients.items()}
    for name in dict.fromkeys(name for values in whole.values() for name, array in values.items() if _is_slice(array)):
        parts = {key: array for key, values in whole.items() if (array := values.pop(name, None)) is not None}
        for group in _tables(parts):
            table = assembled([parts[key] for key in group])
            if table is not None:
                whole[group[0]][name] = table
    return whole


def assembled(parts: Sequence[StoredArray]) -> StoredArray | None:
    """Return the table that its slices make up; None if one is missing."""
    if not parts or len(parts) != parts[0].slices:
        return None
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    return replace(parts[0], norm=norm, rows=None, slices=0, parts=tuple(parts))


def _is_slice(array: StoredArray | None) -> bool:
    return array is not None and array.slices > 0
