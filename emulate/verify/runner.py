"""One run of the program on one topology: started, watched, ended, its trace and its end returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from emulate.cluster import ClusterPlan, HangJudge, Preload, RunningCluster
from emulate.probe import ProbePlan, Trace
from emulate.program import Program
from emulate.topology import Topology
from emulate.verify.host import RecordedProgram

if TYPE_CHECKING:
    from emulate.progress import Progress

POLL_SECONDS = 0.05
UNPROBED_SECONDS = 10.0


@dataclass(frozen=True)
class Settings:
    """What is the same for all runs of a verification."""

    program: Program
    seed: int = 0
    steps: int | None = 20
    timeout: float = 300.0
    network: str = "own"
    all_reduce: str = "auto"
    precision: str = "float32"
    tf_config: bool = False
    reference_args: tuple[str, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RunResult:
    """How a run went.

    Attributes:
        status: `ok`, `failed` (the program raised or left with an error), or `hung`.
        reason: Of a hung run `hang` or `timeout`.
        cause: Of a hung run what the hang judge suspects: a cause code.
        failure: The program's own traceback, or how its process ended.
        where: Of a hung run: what each host was doing.
    """

    label: str
    topology: Topology
    trace: Trace | None
    status: str = "ok"
    reason: str | None = None
    cause: str | None = None
    failure: str | None = None
    where: str = ""
    statuses: dict[int, str] = field(default_factory=dict)
    codes: dict[int, int | None] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    xla: bool = False
    seconds: float = 0.0


class Stopped(Exception):
    """The verification was interrupted; its runs end."""


@final
class Runner:
    """Runs a program as often as asked, several runs at a time, all from one pre-loaded parent.

    Args:
        settings: What is the same for all runs.
        directory: Where traces and outputs go, a folder for each run.
        progress: Told of every run.
        preload: A pre-loaded parent that is up already and stays up; one of its own unless given.
        workers: How many runs may go on at once.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        progress: Progress,
        *,
        preload: Preload | None = None,
        workers: int = 2,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._progress = progress
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="gpudist-run")
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._preload = Preload() if preload is None else preload
        self._own = self._preload if preload is None else None
        self._fresh: Preload | None = None

    def __enter__(self) -> Runner:
        if self._own is not None:
            self._own.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for preload in (self._own, self._fresh):
            if preload is not None:
                preload.__exit__(kind, error, trace)

    def start(self, label: str, topology: Topology, plan: ProbePlan, *, reference: bool = False) -> Future[RunResult]:
        """Run the program; `plan.trace` is chosen here."""
        folder = self._directory / label.replace(" ", "-")
        plan = replace(plan, trace=folder, steps=self._settings.steps, precision=self._settings.precision)
        return self._pool.submit(self._run, label, topology, plan, reference)

    def empty_trace(self, result: RunResult) -> Trace:
        """A trace without events, for a run that left none."""
        folder = self._directory / f"{result.label.replace(' ', '-')}-nothing"
        Trace.describe(folder, {"topology": str(result.topology)})
        return Trace(folder)

    def start_unprobed(self, label: str, topology: Topology, seconds: float) -> Future[RunResult]:
        """Run the program as it is, nothing recorded, for at most so many seconds."""
        return self._pool.submit(self._run_unprobed, label, topology, max(seconds, UNPROBED_SECONDS))

    def _run_unprobed(self, label: str, topology: Topology, seconds: float) -> RunResult:
        result = RunResult(label, topology, None)
        self._progress.run_started(label, None)
        folder = self._directory / label.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self._attempt(result, folder, None, reference=False, seconds=seconds)
        if result.status == "hung" and result.reason == "timeout":
            result.status = "ok"
        self._progress.run_ended(label, result.status)
        return result

    def _run(self, label: str, topology: Topology, plan: ProbePlan, reference: bool) -> RunResult:
        started = time.monotonic()
        result = RunResult(label, topology, None)
        self._progress.run_started(label, plan.steps)
        try:
            self._attempt(result, plan.trace, plan, reference=reference, seconds=self._settings.timeout)
            result.trace = Trace(plan.trace)
        finally:
            result.seconds = time.monotonic() - started
            self._progress.run_ended(label, result.status)
        return result

    def _attempt(self, result: RunResult, folder: Path, plan: ProbePlan | None, *, reference: bool, seconds: float) -> None:
        if plan is not None:
            self._describe(result, plan, reference)
        entry = self._entry(plan, reference)
        preload = self._fresh or self._preload
        with preload.launch(self._cluster_plan(result.topology, folder, entry, reference)) as cluster:
            needs_fresh = self._watch(cluster, result, seconds)
        if needs_fresh and preload is self._preload:
            self._use_fresh()
            self._attempt(result, folder, plan, reference=reference, seconds=seconds)

    def _use_fresh(self) -> None:
        """From now on hosts come from a process that has not imported TensorFlow."""
        with self._lock:
            if self._fresh is None:
                fresh = Preload(imports=False)
                fresh.__enter__()
                self._fresh = fresh

    def _entry(self, plan: ProbePlan | None, reference: bool) -> RecordedProgram:
        settings = self._settings
        program = settings.program
        if reference and settings.reference_args is not None:
            program = replace(program, args=settings.reference_args)
        return RecordedProgram(program, plan, settings.seed, settings.precision)

    def _cluster_plan(self, topology: Topology, folder: Path, entry: RecordedProgram, reference: bool) -> ClusterPlan:
        settings = self._settings
        return ClusterPlan(
            topology=topology,
            entry=entry,
            directory=folder,
            all_reduce=settings.all_reduce,
            network=settings.network,
            tf_config=settings.tf_config if reference else None,
            reference=reference,
            views=(Path.cwd(), *settings.program.folders),
            cwd=Path.cwd(),
        )

    def _describe(self, result: RunResult, plan: ProbePlan, reference: bool) -> None:
        settings = self._settings
        about = {
            "topology": str(result.topology),
            "program": settings.program.name,
            "role": "reference" if reference else "topology",
            "label": result.label,
            "seed": settings.seed,
            "steps": settings.steps,
            "precision": settings.precision,
            "versions": dict(settings.versions),
        }
        Trace.describe(plan.trace, about)

    def _watch(self, cluster: RunningCluster, result: RunResult, seconds: float) -> bool:
        """Follow a run to its end. True when the program needs a process that has not imported TensorFlow."""
        judge = HangJudge(result.topology)
        reached: set[int] = set()
        deadline = time.monotonic() + seconds
        while True:
            for host, event in cluster.events(POLL_SECONDS):
                judge.feed(host, event)
                if event["event"] == "needs-fresh-process":
                    cluster.end()
                    return True
                self._see(result, host, event, reached)
            self._stop_if_asked()
            if cluster.is_over or self._all_reached(cluster, reached):
                break
            hang = judge.verdict(cluster)
            if hang is not None or time.monotonic() > deadline:
                self._hung(cluster, result, hang, seconds)
                break
        cluster.end()
        self._ended(cluster, result, reached)
        return False

    def _see(self, result: RunResult, host: int, event: Mapping[str, Any], reached: set[int]) -> None:
        kind = event["event"]
        if kind == "progress":
            self._progress.step(result.label, event["step"])
        elif kind == "reached":
            reached.add(host)
        elif kind == "note":
            result.xla = result.xla or event["code"] == "xla-off"
            if event["text"] not in result.notes:
                result.notes.append(event["text"])

    def _stop_if_asked(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _all_reached(self, cluster: RunningCluster, reached: set[int]) -> bool:
        """Whether every host is held at the last wanted step, or is over."""
        over = {outcome.host for outcome in cluster.outcomes}
        trainers = set(range(len(cluster.roles)))
        return bool(reached) and trainers <= reached | over

    def _hung(self, cluster: RunningCluster, result: RunResult, hang: Any, seconds: float) -> None:
        result.status = "hung"
        result.reason = "hang" if hang is not None else "timeout"
        result.cause = None if hang is None else hang.code
        result.where = f"no end after {seconds:g} s" if hang is None else hang.description
        result.stacks = cluster.stacks()

    def _ended(self, cluster: RunningCluster, result: RunResult, reached: set[int]) -> None:
        result.notes += [note for note in cluster.notes if note not in result.notes]
        for outcome in cluster.outcomes:
            result.statuses[outcome.host] = outcome.status
            result.codes[outcome.host] = outcome.code
            if result.status == "ok" and outcome.status in ("raised", "exited", "killed") and outcome.host not in reached:
                self._failed(result, outcome)

    def _failed(self, result: RunResult, outcome: Any) -> None:
        if outcome.status == "exited" and outcome.code == 0:
            return
        result.status = "failed"
        if outcome.error is not None:
            result.failure = outcome.error.traceback_text
        else:
            how = f"exit code {outcome.code}" if outcome.status == "exited" else f"signal {-(outcome.code or 0)}"
            result.failure = f"The process of host {outcome.host} ended with {how}."
