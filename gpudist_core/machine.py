"""Find out how much memory this machine has left, without an import of TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_STATISTICS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_RECLAIMED = ("total_inactive_file", "inactive_file")
"""Counters of page cache that the kernel can free, although it counts as the container's memory use."""


def free_memory() -> int:
    """Return the bytes that are available without swapping, within the container's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used, statistics = map(_text_in, (_LIMITS, _USES, _STATISTICS))
    if not (limit.isdecimal() and used.isdecimal()):  # "max": no limit
        return free
    return min(free, max(0, int(limit) - int(used) + _reclaimable(statistics)))


def _reclaimable(statistics: str) -> int:
    numbers = dict(line.split(maxsplit=1) for line in statistics.splitlines() if line.count(" ") == 1)
    return next((int(numbers[name]) for name in _RECLAIMED if name in numbers), 0)


def _text_in(paths: Sequence[str]) -> str:
    """Return what the first of the files says that is there; nothing where none is."""
    for path in paths:
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="ascii").strip()
    return ""
