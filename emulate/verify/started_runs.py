"""Keep the runs that were started, and tell where they met: in files that several of them could see."""

from __future__ import annotations

import threading

from emulate.verify.meetings import Met
from emulate.verify.result import RunResult


class StartedRuns:
    """Hold every start of the program. Any thread may add one."""

    def __init__(self) -> None:
        self._results: list[RunResult] = []
        self._lock = threading.Lock()

    def add(self, result: RunResult) -> None:
        """Add a run that starts; each restart after a fault is one."""
        with self._lock:
            self._results.append(result)

    def __len__(self) -> int:
        with self._lock:
            return len(self._results)

    def meetings(self) -> list[str]:
        """Return paths that several runs wrote and each could see."""
        return sorted(path for path, runs in self._writers().items() if len(runs) > 1)

    def replaced(self) -> list[str]:
        """Return existing files outside of the runs' own folders that runs wrote or removed."""
        with self._lock:
            return sorted({path for run in self._results for path, was_there in list(run.written.items()) if was_there})

    def note_meetings(self, result: RunResult) -> None:
        """Note what a finished run has in common with others. All restarts of one program are one run."""
        by_others = {path for path, runs in self._writers().items() if runs - {result.label}}
        result.met = Met.of(result.read, result.written, by_others)

    def _writers(self) -> dict[str, set[str]]:
        """Return, by path that other runs can see, the runs that wrote it. Some may still run."""
        by: dict[str, set[str]] = {}
        with self._lock:
            for run in self._results:
                for path in list(run.written):
                    by.setdefault(path, set()).add(run.label)
        return by
