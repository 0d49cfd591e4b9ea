"""A runner that starts nothing: each run ends at once with the trace that a test has for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.lab import Lab
from emulate.verify.result import RunResult
from emulate.verify.run_spec import Arm
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings, StepLimit

Answer = Callable[[str, Topology, ProbePlan], Trace | str]
"""(label, topology, plan) -> the trace; a text is the traceback of a run that raised."""


class FakeRunner:
    """Takes a lab's runs. `made` has the labels of all in their order, `started` those of the program's starts.

    `plain` is the traceback of the program without emulation; it ends well without one.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        evaluates: bool = True,
        folder: Path | None = None,
        plain: str | None = None,
        **settings: Any,
    ) -> None:
        self.made: list[str] = []
        self.traces: dict[str, Trace] = {}
        self.started: list[str] = []
        self.evaluations = 0
        self.settings = Settings(program=cast(Any, None), **settings)
        self.limit = StepLimit(None, 1)
        self._answer, self._evaluates, self._folder, self._plain = answer, evaluates, folder, plain

    def start(
        self, label: str, topology: Topology, plan: ProbePlan, *, reference: bool = False, arm: Arm | None = None
    ) -> Future[RunResult]:
        self.started.append(label)
        return self._end(label, topology, plan, is_evaluated=False)

    def start_evaluated(
        self, label: str, topology: Topology, plan: ProbePlan, source: Future[RunResult], *, or_run: bool = True
    ) -> Future[RunResult]:
        if self._evaluates or or_run:
            self.started += [] if self._evaluates else [label]
            self.evaluations += self._evaluates
            return self._end(label, topology, plan, is_evaluated=self._evaluates)
        self.made.append(label)
        return ended(RunResult(label, topology, None, status="failed"))

    def find_joins(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"refused": "made traces have no functions"}

    def start_plain(self, seconds: float) -> Future[RunResult]:
        self.made.append("without gpudist")
        status = "ok" if self._plain is None else "failed"
        return ended(RunResult("without gpudist", REFERENCE, None, status, failure=self._plain))

    def expect(self, runs: int) -> None:
        """Nobody is told."""

    def empty_trace(self, result: RunResult) -> Trace:
        assert self._folder is not None
        Trace.describe(self._folder / "nothing", {"topology": str(result.topology)})
        return Trace(self._folder / "nothing")

    def _end(self, label: str, topology: Topology, plan: ProbePlan, *, is_evaluated: bool) -> Future[RunResult]:
        self.made.append(label)
        answer = self._answer(label, topology, plan)
        result = RunResult(label, topology, None, is_evaluated=is_evaluated)
        if isinstance(answer, str):
            result.status, result.failure = "failed", answer
        else:
            result.trace = self.traces[label] = answer
        return ended(result)


def lab_of(runner: FakeRunner) -> Lab:
    return Lab(cast(Runner, runner), seed=0)


def ended(result: RunResult) -> Future[RunResult]:
    run: Future[RunResult] = Future()
    run.set_result(result)
    return run


def noise_of(traces: Sequence[Trace], reference: Trace) -> Answer:
    """Answer with a reference and its noise runs."""
    return lambda label, topology, plan: traces[plan.noise_seed - 1] if plan.perturb else reference
