"""Mapped rows kept in memory, by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from gpudist_core.pipelines.hashing import Integers
from gpudist_core.pipelines.sources.access import Rows


class RowCache:
    """The rows that this host has met, each made once. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known = np.zeros(0, bool)
        self._parts: Rows = []

    def get(self, rows: Integers, make: Callable[[Integers], Rows]) -> Rows:
        """The rows of these numbers.

        Args:
            rows: Their numbers.
            make: Makes the rows at some places of `rows`; called for those that are not kept yet.

        Returns:
            The rows, flattened.
        """
        with self._lock:
            self._grow(int(rows.max(initial=-1)) + 1)
            missing = np.flatnonzero(~self._known[rows])
        if len(missing) or not len(rows):
            made = [np.asarray(part) for part in make(missing)]
            if not len(rows):
                return made
            with self._lock:
                self._keep(rows[missing], made)
        with self._lock:
            return [part[rows] for part in self._parts]

    def _grow(self, length: int) -> None:
        old = len(self._known)
        if length <= old:
            return
        new = max(length, 2 * old)
        self._known = _longer(self._known, new, zero=True)
        self._parts = [_longer(part, new) for part in self._parts]

    def _keep(self, rows: Integers, made: Rows) -> None:
        if not self._parts:
            self._parts = [np.empty((len(self._known), *part.shape[1:]), part.dtype) for part in made]
        for part, values in zip(self._parts, made, strict=True):
            part[rows] = values
        self._known[rows] = True


def _longer(part: Any, length: int, zero: bool = False) -> Any:
    longer = (np.zeros if zero else np.empty)((length, *part.shape[1:]), part.dtype)
    longer[: len(part)] = part
    return longer
