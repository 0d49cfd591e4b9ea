"""Write a trace while the program runs, and validate one that comes from elsewhere."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emulate.trace.format import Array, Trace


class TraceWriter:
    """Write one host's part of a trace during the run, from any thread.

    Args:
        directory: The folder `host-<number>`, made if it is not there.
        budget: How many bytes of arrays may be kept in full; beyond it `SAMPLE` elements of each are kept.
    """

    SAMPLE = 1024
    MOST_WHOLE = 4 << 30
    """Bytes of arrays that may be kept whole beside the budget, where the disk has the room."""
    SHARE_OF_DISK = 1 / 8
    """They take at most this part of the free bytes: several hosts of several runs write at the same time."""

    def __init__(self, directory: Path, *, budget: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._events = (directory / "events.jsonl").open("w", encoding="utf-8")
        self._arrays = (directory / "arrays.bin").open("wb")
        self._budget = budget
        self._room = min(self.MOST_WHOLE, int(shutil.disk_usage(directory).free * self.SHARE_OF_DISK))
        # Steps are written by one thread, what collectives and the program tell by others. The end of the file is counted
        # here: BufferedWriter.tell() beside another thread's flush() may answer with a place in between (CPython 3.11).
        self._lock = threading.RLock()
        self._end = 0

    def array(self, array: Array, *, rows: Array | None = None, whole: bool = False) -> dict[str, Any]:
        """Keep an array and return what an event says of it.

        Args:
            array: The array; for a sparse gradient the values of its rows.
            rows: For a sparse gradient: the row numbers, unique and sorted.
            whole: Keep it all, whatever the budget.

        Returns:
            The entry for the event.
        """
        contents = np.ascontiguousarray(array)
        flat = contents.reshape(-1)
        stride = self._stride(contents.nbytes, flat.size) if rows is None and not whole else 1
        kept = np.ascontiguousarray(flat[::stride])
        with self._lock:
            at = self._end
            self._end += self._arrays.write(kept.data if kept.size else b"")
            self._budget -= 0 if whole else kept.nbytes
        entry: dict[str, Any] = {"at": at, "dtype": contents.dtype.str, "shape": list(contents.shape)}
        if stride > 1:
            entry["stride"] = stride
        if not _is_finite(flat):
            entry["finite"] = False
        if rows is not None:
            entry["rows"] = self.array(rows, whole=True)
        return entry

    def takes_whole(self, nbytes: int) -> bool:
        """Return whether there is room for so many bytes beside the budget, and take it."""
        with self._lock:
            fits = nbytes <= self._room
            self._room -= nbytes if fits else 0
        return fits

    def _stride(self, nbytes: int, size: int) -> int:
        return max(1, -(-size // self.SAMPLE)) if nbytes > self._budget else 1

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event; it is on disk when this returns, so that a killed host loses nothing it had written."""
        line = json.dumps(event, separators=(",", ":")) + "\n"
        with self._lock:
            self._arrays.flush()
            self._events.write(line)
            self._events.flush()

    def close(self) -> None:
        """Close both files."""
        self._events.close()
        self._arrays.close()


_AT_ONCE = 1 << 12
"""Elements that are added up at a time: in pieces of this size a sum takes a tenth of the time that `np.isfinite` does."""


def _is_finite(flat: Array) -> bool:
    if flat.dtype.kind not in "fc":
        return True
    pieces = flat[: flat.size // _AT_ONCE * _AT_ONCE].reshape(-1, _AT_ONCE)
    # A sum is not finite where an element is not. Where it has only become too large, the elements are looked at.
    sums = np.einsum("ij,ij->i", pieces, pieces)
    return bool(np.isfinite(sums).all() and np.isfinite(flat[pieces.size :]).all()) or bool(np.isfinite(flat).all())


_ABOUT = {"program": str, "seed": int, "precision": str, "device": str, "versions": dict}
_EVENTS = {
    "strategy": ("name", "replicas"),
    "streams": ("streams",),
    "seeded": ("generator",),
    "shared": ("name",),
    "left": ("changed",),
    "end": ("reason",),
}
"""Keys of each event that are read later. Steps, variables and reports are read here."""


def check_intact(trace: Trace) -> None:
    """Read all of a trace but its arrays.

    Args:
        trace: The trace.

    Raises:
        ValueError: When something in it is not as it was written.
    """
    for name, kind in _ABOUT.items():
        if not isinstance(trace.about.get(name), (kind, type(None))):
            raise ValueError(f"trace.json has {name} {trace.about[name]!r}")
    try:
        for _, event in trace.events:
            for name in _EVENTS.get(event["event"], ()):
                event[name]
        for name in trace.optimizers:
            trace.steps(name)
        _ = trace.reports, *map(trace.variables, ("initial", "final", "left"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an event lacks something, or has it in another form ({type(error).__name__}: {error})") from error
