"""Keep mapped examples in memory, by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from gpudist_core.pipelines.hashing import Integers
from gpudist_core.pipelines.sources.access import Rows


class RowCache:
    """Cache the examples that this host has made, each once. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Numbers of rows may be far apart: where each lies is looked up.
        self._places: dict[int, int] = {}
        self._parts: Rows = []

    def get(self, rows: Integers, make: Callable[[Integers], Rows]) -> Rows:
        """Return the examples with these numbers.

        Args:
            rows: Their numbers.
            make: A function that makes the examples at some places of `rows`. It is called for those that are not cached yet.

        Returns:
            The examples, flattened.
        """
        numbers = rows.tolist()
        with self._lock:
            missing = np.array([i for i, number in enumerate(numbers) if number not in self._places], np.int64)
        if not numbers:
            return make(missing)
        new_rows = [np.asarray(part) for part in make(missing)] if len(missing) else []
        with self._lock:
            if new_rows:
                self._keep([numbers[i] for i in missing], new_rows)
            places = [self._places[number] for number in numbers]
            return [part[places] for part in self._parts]

    def _keep(self, numbers: list[int], rows: Rows) -> None:
        # Another thread may have made the same rows meanwhile: then they are the same, and lie where it put them.
        for number in numbers:
            self._places.setdefault(number, len(self._places))
        if not self._parts:
            self._parts = [np.empty((0, *part.shape[1:]), part.dtype) for part in rows]
        if len(self._places) > len(self._parts[0]):
            self._parts = [_longer(part, max(len(self._places), 2 * len(part))) for part in self._parts]
        for part, values in zip(self._parts, rows, strict=True):
            part[[self._places[number] for number in numbers]] = values


def _longer(part: Any, length: int) -> Any:
    longer = np.empty((length, *part.shape[1:]), part.dtype)
    longer[: len(part)] = part
    return longer
