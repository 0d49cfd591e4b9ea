"""Verify a program as `gpudist verify` does, and note each run: `python -m benchmarks.evidence.recording FOLDER verify ...`."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, final
from unittest import mock

from benchmarks.evidence.store import RUNS, Call, StoredRun, earlier_trace, plain_plan, runs_file, to_plain
from emulate.cli import main
from emulate.recorder import ProbePlan
from emulate.topology import Topology
from emulate.verify.result import RunResult
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings


@final
class RecordingRunner:
    """Pass all on to a runner, and note what it was asked for and how that went.

    Args:
        cell: The folder for traces and notes.
        settings: As of the runner.
        directory: Not used: traces go to the cell's folder.
        others: As of the runner.
    """

    def __init__(self, cell: Path, settings: Settings, directory: Path | None, *others: Any, **options: Any) -> None:
        self._traces = cell / RUNS
        self._runner = Runner(settings, self._traces, *others, **options)
        self._file = runs_file(cell)
        self._lock = threading.Lock()
        self._asked: dict[str, list[Future[RunResult]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __enter__(self) -> RecordingRunner:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.__exit__(kind, error, trace)

    def start(self, label: str, topology: Topology, plan: ProbePlan, *, reference: bool = False) -> Future[RunResult]:
        """Run the program."""
        self._keep_earlier(label)
        run = self._runner.start(label, topology, plan, reference=reference)
        return self._noted(Call("program", label, plain_plan(plan)), run)

    def start_evaluated(
        self, label: str, topology: Topology, plan: ProbePlan, source: Future[RunResult], *, or_run: bool = True
    ) -> Future[RunResult]:
        """Evaluate the functions of another run."""
        self._keep_earlier(label)
        run = self._runner.start_evaluated(label, topology, plan, source, or_run=or_run)
        return self._noted(Call("evaluated", label, plain_plan(plan)), run, source, or_run=or_run)

    def start_unprobed(self, label: str, topology: Topology, seconds: float) -> Future[RunResult]:
        """Run the program with nothing recorded."""
        return self._noted(Call("unprobed", label), self._runner.start_unprobed(label, topology, seconds))

    def start_plain(self, seconds: float) -> Future[RunResult]:
        """Run the program without emulation."""
        return self._noted(Call("plain", "without gpudist"), self._runner.start_plain(seconds))

    def _keep_earlier(self, label: str) -> None:
        """Copy the trace of an earlier run of this name, which the runner would write over."""
        earlier = self._asked.get(label, [])
        folder = self._traces / label.replace(" ", "-")
        if earlier:
            wait(earlier)
            shutil.copytree(folder, earlier_trace(folder, len(earlier)))

    def _noted(
        self, call: Call, run: Future[RunResult], source: Future[RunResult] | None = None, *, or_run: bool = True
    ) -> Future[RunResult]:
        """Return a future that ends once the run is noted: who gets the result may change it."""
        noted: Future[RunResult] = Future()
        self._asked.setdefault(call.label, []).append(noted)
        run.add_done_callback(partial(self._note, call, source, or_run, noted))
        return noted

    def _note(
        self, call: Call, source: Future[RunResult] | None, or_run: bool, noted: Future[RunResult], run: Future[RunResult]
    ) -> None:
        try:
            result = run.result()
            call = replace(call, source=None if source is None else source.result().label)
            with self._lock, self._file.open("a") as file:
                file.write(StoredRun(call, or_run, to_plain(result)).to_line())
            noted.set_result(result)
        except BaseException as error:  # as of the run: whoever asked for it gets it
            noted.set_exception(error)


def with_runner(make: Callable[..., Any]) -> Any:
    """Return a context in which verifications get this runner."""
    return mock.patch("emulate.verify.api.Runner", make)


if __name__ == "__main__":
    with with_runner(partial(RecordingRunner, Path(sys.argv[1]))):
        sys.exit(main(sys.argv[2:]))
