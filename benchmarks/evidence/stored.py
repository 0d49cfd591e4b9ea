"""A runner that starts no program: it answers with stored runs, and evaluates stored functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

from benchmarks.evidence.store import RUNS, Call, StoredRun, from_plain, plain_plan, read_runs
from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE, Topology
from emulate.verify.result import RunResult, StartedRuns
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings


@dataclass
class Asked:
    """Count what a judge asked for beside the stored runs.

    Attributes:
        stored: The evaluations that were stored.
        evaluated: Those that were made now.
        lacking: The runs that would need a start of the program.
    """

    stored: list[str] = field(default_factory=list)
    evaluated: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


@final
class StoredRunner:
    """Answer with the stored runs of a cell. A start that is not stored fails.

    Args:
        cell: The folder with its evidence.
        asked: Is filled.
        settings: As of the runner that evaluates.
        directory: Not used: the evidence stays as it is, and what is evaluated now goes with the runner.
        others: As of the runner that evaluates.
    """

    def __init__(
        self, cell: Path, asked: Asked, settings: Settings, directory: Path | None, *others: Any, **options: Any
    ) -> None:
        self._runs, self._traces, self._asked = read_runs(cell), cell / RUNS, asked
        self._runner = Runner(settings, None, *others, **options)
        self.started = StartedRuns()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __enter__(self) -> StoredRunner:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.__exit__(kind, error, trace)

    def start(self, label: str, topology: Topology, plan: ProbePlan, *, reference: bool = False) -> Future[RunResult]:
        """Return the stored run of the program."""
        return self._start(Call("program", label, plain_plan(plan)), topology)

    def start_unprobed(self, label: str, topology: Topology, seconds: float) -> Future[RunResult]:
        """Return the stored run with nothing recorded."""
        return self._start(Call("unprobed", label), topology)

    def start_plain(self, seconds: float) -> Future[RunResult]:
        """Return the stored run without emulation."""
        return self._start(Call("plain", "without gpudist"), REFERENCE)

    def start_with_faults(self, topology: Topology, plan: ProbePlan) -> NoReturn:
        """Refuse: nothing is recorded of a program with faults."""
        raise LookupError(f"Evidence must be of programs without faults. Received: topology={topology}, trace={plan.trace}.")

    def start_evaluated(
        self, label: str, topology: Topology, plan: ProbePlan, source: Future[RunResult], *, or_run: bool = True
    ) -> Future[RunResult]:
        """Return the stored evaluation, or the program's run in its place; evaluate now what nobody has asked for before."""
        call = Call("evaluated", label, plain_plan(plan), source.result().label)
        evaluated = self._find(call, lambda run: run.result["is_evaluated"])
        if evaluated is not None:
            self._asked.stored.append(label)
            return _ended(evaluated)
        if self._find(call, lambda run: True) is None:
            self._asked.evaluated.append(label)
            made = self._runner.start_evaluated(label, topology, plan, source, or_run=False)
            if made.result().is_evaluated:
                return made
        # Its functions cannot be evaluated: the runner would start the program, if it may.
        return self._start(call, topology) if or_run else _ended(RunResult(label, topology, None, status="failed"))

    def _start(self, call: Call, topology: Topology) -> Future[RunResult]:
        result = self._find(call, lambda run: run.or_run)
        if result is None:
            self._asked.lacking.append(call.label)
            result = RunResult(call.label, topology, None, status="failed", failure="The evidence does not hold this run.")
        self.started.add(result)
        return _ended(result)

    def _find(self, call: Call, suits: Callable[[StoredRun], bool]) -> RunResult | None:
        return next((from_plain(run.result, self._traces) for run in self._runs if run.call == call and suits(run)), None)


def _ended(result: RunResult) -> Future[RunResult]:
    run: Future[RunResult] = Future()
    run.set_result(result)
    return run
