"""Shuffle the examples of a stream in a buffer of fixed size, and cut them into batches, as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpudist_core.pipelines.hashing import BUFFER, BUFFER_REST, Integers, permutation, words
from gpudist_core.pipelines.sources.access import Rows


def rebatched(chunks: Iterator[Rows], size: int) -> Iterator[Rows]:
    """Yield the same examples in the same order, `size` at a time. The remainder comes last.

    Args:
        chunks: Examples, in chunks of any size.
        size: Examples of a batch.

    Yields:
        The batches.
    """
    held: list[Rows] = []
    count = 0
    for chunk in chunks:
        held.append(chunk)
        count += len(chunk[0])
        if count < size:
            continue
        whole = _joined(held)
        for start in range(0, count - size + 1, size):
            yield [part[start : start + size] for part in whole]
        count %= size
        held = [[part[len(part) - count :] for part in whole]] if count else []
    if count:
        yield _joined(held)


def _joined(chunks: list[Rows]) -> Rows:
    return chunks[0] if len(chunks) == 1 else [np.concatenate(parts) for parts in zip(*chunks, strict=True)]


def shuffled_chunks(chunks: Iterator[Rows], size: int, seed: int, epoch: int) -> Iterator[Rows]:
    """Yield the same examples, each swapped with a random one in a buffer of `size` examples.

    The remainder comes last, shuffled.

    Args:
        chunks: Examples, in chunks of any size.
        size: Examples in the buffer.
        seed: The seed of the pipeline.
        epoch: The number of the epoch.

    Yields:
        Chunks of examples.
    """
    buffer = _Buffer(size)
    for number, chunk in enumerate(chunks):
        draws = words(seed, BUFFER, epoch, number, np.arange(len(chunk[0])))
        yield from buffer.exchange(chunk, (draws % np.uint64(size)).astype(np.int64))
    yield from buffer.rest(lambda count: permutation(count, seed, BUFFER_REST, epoch))


class _Buffer:
    """Hold examples in numbered slots: `_order[i]` is the slot of the i-th example, `_free` lists unused slots."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._slots: Rows = []
        self._order: list[int] = []
        self._free: list[int] = []

    def exchange(self, chunk: Rows, places: Integers) -> Iterator[Rows]:
        """Add a chunk. In a full buffer, each new example replaces the one at its place."""
        leaving = []
        for slot, place in zip(self._store(chunk), places.tolist(), strict=True):
            if len(self._order) < self._size:
                self._order.append(slot)
            else:
                leaving.append(self._order[place])
                self._order[place] = slot
        self._free += leaving
        if leaving:
            yield [part[leaving] for part in self._slots]

    def rest(self, permute: Any) -> Iterator[Rows]:
        if self._order:
            yield [part[np.asarray(self._order)[permute(len(self._order))]] for part in self._slots]

    def _store(self, chunk: Rows) -> list[int]:
        count = len(chunk[0])
        if len(self._free) < count:
            self._grow(chunk, count - len(self._free))
        slots = [self._free.pop() for _ in range(count)]
        for part, values in zip(self._slots, chunk, strict=True):
            part[slots] = values
        return slots

    def _grow(self, chunk: Rows, missing: int) -> None:
        old = len(self._slots[0]) if self._slots else 0
        new = old + max(missing, old)
        grown = [np.empty((new, *values.shape[1:]), values.dtype) for values in chunk]
        for part, before in zip(grown, self._slots, strict=False):
            part[:old] = before
        self._slots = grown
        self._free += range(old, new)
