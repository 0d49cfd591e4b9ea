"""Run the program once on one topology: start it, watch it, end it, and return its trace and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from emulate.cluster import ClusterPlan, Preload, RunningCluster, asks_to_go_on, next_life, read_at_import, remove_tree
from emulate.evaluate import refusal
from emulate.recorder import ProbePlan
from emulate.told import Told, told
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.checks import check_same_hosts
from emulate.verify.host import COMPARABLE_ON_GPUS, Counting, Evaluation, Joining, RecordedProgram
from emulate.verify.processes import Parents, RunWatch
from emulate.verify.recovery import Lives
from emulate.verify.result import RunResult, StartedRuns, error_line
from emulate.verify.run_spec import Arm
from emulate.verify.settings import Settings, StepLimit

if TYPE_CHECKING:
    from emulate.progress import Progress

UNPROBED_SECONDS = 10.0
_ERROR = re.compile(r"^([\w.]*(?:Error|Exception|NotReproduced): .{,80})", re.MULTILINE)
PLAIN_SECONDS = 60.0
"""Smallest time limit of a plain run, in seconds. A plain run imports TensorFlow itself."""


@final
class Runner:
    """Run a program as often as asked, several runs at a time, all from one pre-loaded parent.

    Args:
        settings: What is the same for all runs.
        directory: Where traces and outputs go, a folder for each run; None for one that goes with the runner.
        progress: Told of every run.
        preload: A pre-loaded parent that is up already and stays up; one of its own unless given.
        workers: How many runs may go on at once.

    Attributes:
        settings: What is the same for all runs.
        limit: At which step the runs stop.
        started: The runs of the program so far.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path | None,
        progress: Progress,
        *,
        preload: Preload | None = None,
        workers: int = 2,
    ) -> None:
        self.settings = settings
        self._kept = directory
        self._directory = directory or Path()
        self._progress = progress
        workers = 1 if settings.device == "gpu" else workers  # a GPU serves one cluster at a time
        self.limit = StepLimit(settings.steps, workers)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="gpudist-run")
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._begun = time.time()
        self.started = StartedRuns()
        self.evaluations = 0
        self._notes: dict[Told, None] = {}
        self._environment: dict[str, str] = {}
        # Hosts have our own part from the process that they are forked from, instead of importing it each for itself.
        self._parents = Parents(preload, (__package__, *settings.program.imports))

    def __enter__(self) -> Runner:
        if self._kept is None:
            self._directory = Path(tempfile.mkdtemp(dir=self._parents.first.directory))  # goes with it even when we are killed
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._kept is None:
            remove_tree(self._directory)
        self._parents.close()

    def start(
        self, label: str, topology: Topology, plan: ProbePlan, *, reference: bool = False, arm: Arm | None = None
    ) -> Future[RunResult]:
        """Run the program; `plan.trace` is chosen here."""
        asks = self.limit.join(label)

        def made() -> RunResult:
            # With one worker, as on GPUs, only now is it known where the run before this one has decided to stop.
            whole = replace(self._with_settings(plan, self._folder_of(label)), asks=asks)
            return self._run(label, topology, whole, reference, arm)

        return self._pool.submit(made)

    def start_evaluated(
        self, label: str, topology: Topology, plan: ProbePlan, source: Future[RunResult], *, or_run: bool = True
    ) -> Future[RunResult]:
        """Make a run that does the mathematics of a run that was started before.

        Args:
            label: Its name.
            topology: Where the program runs if its functions cannot be evaluated.
            plan: How it differs; `trace` is chosen here.
            source: The other run.
            or_run: Whether the program runs where its functions cannot be evaluated.

        Returns:
            The result: evaluated from the functions of the other run, else of the program, or failed.
        """

        def made() -> RunResult:
            other = source.result()  # at its end it is known how many steps there are
            whole = self._with_settings(plan, self._folder_of(label))
            result = self._evaluate(label, whole, other)
            if isinstance(result, RunResult):
                return result
            if not or_run:
                return RunResult(label, topology, None, status="failed")
            if result and plan.perturb and plan.replay is None:  # what is run again for a cause is run in any case
                with self._lock:
                    self._notes.setdefault(_STARTED_AGAIN.format(result.rstrip(".")))
            return self._run(label, topology, whole, True)

        return self._pool.submit(made)

    def _evaluate(self, label: str, plan: ProbePlan, source: RunResult) -> RunResult | str:
        """Evaluate the functions of a run; return why that is not possible where it is not."""
        if source.status != "ok" or source.trace is None:
            return ""
        if (why := refusal(source.trace)) is not None:
            return why
        (plan.trace / "host-0").mkdir(parents=True, exist_ok=True)
        self._progress.run_started(label, None)
        entry = Evaluation(source.trace.directory, plan, self.settings.device)
        result = self._run_without_program(label, plan.trace, entry)
        ending = "ok, without the program" if result.status == "ok" else "not possible without the program"
        self._progress.run_ended(label, ending)
        if result.status == "ok":
            result.trace = Trace(plan.trace)
            return result
        remove_tree(plan.trace)
        errors = _ERROR.findall(result.failure or "")
        return f"its steps could not be evaluated ({errors[-1] if errors else result.status})"

    def count_operations(self, source: RunResult, half: RunResult | None, target: Path) -> None:
        """Count the operations of a recorded run's step, without the program.

        Args:
            source: The run, which kept its functions.
            half: The same with half the batch, if there is one.
            target: The file for the counts. There is none where the steps are not in a graph.
        """
        if source.trace is None:
            return
        entry = Counting(source.trace.directory, half.trace.directory if half and half.trace else None, target)
        self._run_without_program("operations", target.parent, entry)

    def find_joins(
        self, source: Trace, local: Trace | None, topology: Trace, optimizer: str, step: int, *, permutes: bool
    ) -> dict[str, Any]:
        """Find what must see the whole batch in a step, without the program.

        Args:
            source: The run on one device, which kept its functions.
            local: That with one replica's examples, where functions take batches of one size alone.
            topology: The judged run.
            optimizer: Whose gradients differ.
            step: In which step.
            permutes: Whether rows may come in another order.

        Returns:
            What `emulate.evaluate.find_joins` says; `refused` where it ends with an error.
        """
        label = f"joins of {topology.directory.name}"
        folder = self._folder_of(f"{label} {optimizer} {step}")
        folder.mkdir(parents=True, exist_ok=True)
        self._progress.run_started(label, None)
        target, small = folder / "joins.json", None if local is None else local.directory
        entry = Joining(source.directory, small, topology.directory, optimizer, step, permutes, target, self.settings.device)
        result = self._run_without_program(label, folder, entry)
        self._progress.run_ended(label, result.status)
        if not target.exists():
            return {"refused": error_line(result.failure, result.status)}
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found

    def _run_without_program(self, label: str, folder: Path, entry: Evaluation | Counting | Joining) -> RunResult:
        result = RunResult(label, REFERENCE, None, is_evaluated=True)
        plan = replace(self._cluster_plan(REFERENCE, folder, entry, True), tf_config=False, views=())
        self._follow(result, self._parents.current, plan, self.settings.timeout)
        return result

    def _folder_of(self, label: str) -> Path:
        return self._directory / label.replace(" ", "-")

    def _with_settings(self, plan: ProbePlan, folder: Path) -> ProbePlan:
        settings = self.settings
        return replace(
            plan,
            trace=folder,
            steps=self.limit.steps,
            looks_from=self.limit.looks_from,
            budget=min(plan.budget, settings.budget),
        )

    def expect(self, runs: int) -> None:
        """Report how many runs may follow at most; 0 where that is open."""
        self._progress.expect(runs)

    def start_with_faults(self, topology: Topology, plan: ProbePlan) -> Future[Lives]:
        """Run the program with its faults, and start it again as often as it takes, within limits."""
        label = f"{topology} with faults"
        return self._pool.submit(self._run_with_faults, label, topology, plan)

    def _run_with_faults(self, label: str, topology: Topology, plan: ProbePlan) -> Lives:
        plan = replace(self._with_settings(plan, self._folder_of(label)), begun={})
        started = time.monotonic()
        lives = Lives(self.settings.faults)
        self._progress.run_started(label, plan.steps)
        outcome = "stopped"
        try:
            preload = self._parents.current
            while (late := self._live(lives, label, topology, plan, preload)) is not None:
                self._parents.replace(preload, *late)
                preload, lives = self._parents.current, Lives(self.settings.faults)
                remove_tree(plan.trace)
            outcome = f"{lives.last.status}, {len(lives.fired)} of {len(lives.faults)} faults, {lives.restarts} restarts"
        finally:
            for run in lives.runs:
                run.seconds = time.monotonic() - started
            self._progress.run_ended(label, outcome)
        return lives

    def _live(
        self, lives: Lives, label: str, topology: Topology, plan: ProbePlan, preload: Preload
    ) -> tuple[str, str | None] | None:
        """Run the program with all its restarts; return what it sets too late for the process that it is forked from."""
        result = RunResult(label, topology, None)
        self._describe(result, plan, False)
        first = self._cluster_plan(topology, plan.trace, self._entry(plan, False), False)
        self.started.add(result)
        with preload.launch(replace(first, faults=lives.faults)) as cluster:
            while True:
                watch = RunWatch(cluster, result, cluster.plan.directory, self._stopping, self._progress)
                watch.live(self.settings.timeout)
                if watch.late_setting is not None and preload.imports:
                    return watch.late_setting
                watch.note_ends()
                self.started.note_meetings(result)
                lives.add(result, plan, cluster.faults.fired)
                if result.status == "ok" or lives.restarts >= self.settings.restarts or not _goes_on(cluster, result):
                    return None
                following = next_life(cluster, len(lives.runs))
                plan = replace(plan, trace=following.directory, resumed=True, begun=lives.begun)
                result = RunResult(label, topology, None)
                self._describe(result, plan, False)
                self.started.add(result)
                cluster.restart(replace(following, entry=self._entry(plan, False)))

    def empty_trace(self, result: RunResult) -> Trace:
        """Return an empty trace, for a run that left none."""
        folder = self._directory / f"{result.label.replace(' ', '-')}-nothing"
        Trace.describe(folder, {"topology": str(result.topology)})
        return Trace(folder)

    def notes(self) -> list[Told]:
        """Return what the user should know about this machine, each once: refused isolation, shared GPUs."""
        with self._lock:
            return list(self._notes)

    def start_unprobed(self, label: str, topology: Topology, seconds: float) -> Future[RunResult]:
        """Run the program as it is, nothing recorded, for at most so many seconds."""
        return self._pool.submit(self._run_unprobed, label, topology, max(seconds, UNPROBED_SECONDS))

    def start_plain(self, seconds: float) -> Future[RunResult]:
        """Run the program without emulation and recording, as Python alone would, for at most so many seconds.

        It has the reference's TF_CONFIG, where that has one. Its status is `hung` where it was ended then without having
        failed.
        """
        return self._pool.submit(self._run_plain, max(seconds, PLAIN_SECONDS))

    def _run_plain(self, seconds: float) -> RunResult:
        result = RunResult("without gpudist", REFERENCE, None)
        self._progress.run_started(result.label, None)
        folder = self._directory / "without-gpudist"
        folder.mkdir(parents=True, exist_ok=True)
        entry = replace(self._entry(None, True), seed=None, device="cpu")  # TF32 stays as it is
        plan = replace(self._cluster_plan(REFERENCE, folder, entry, True), emulated=False, environment={})
        self._follow(result, self._parents.bare, plan, seconds)
        self._progress.run_ended(result.label, "ended" if result.status == "hung" else result.status)
        return result

    def _run_unprobed(self, label: str, topology: Topology, seconds: float) -> RunResult:
        result = RunResult(label, topology, None)
        self._progress.run_started(label, None)
        folder = self._folder_of(label)
        folder.mkdir(parents=True, exist_ok=True)
        self._attempt(result, folder, None, reference=False, seconds=seconds)
        if result.status == "hung" and result.reason == "timeout":
            result.status = "ok"
        self._progress.run_ended(label, result.status)
        return result

    def _run(self, label: str, topology: Topology, plan: ProbePlan, reference: bool, arm: Arm | None = None) -> RunResult:
        started = time.monotonic()
        result = RunResult(label, topology, None, arm=arm)
        self._progress.run_started(label, plan.steps)
        outcome = "stopped"
        with_onednn = _ONEDNN not in {**os.environ, **self._environment} and self.settings.device == "cpu"
        try:
            self._attempt(result, plan.trace, plan, reference=reference, seconds=self.settings.timeout)
            if (why := (self._without_onednn(result) if with_onednn else None) or self._crash(result)) is not None:
                with self._lock:
                    self._notes.setdefault(why)
                remove_tree(plan.trace)
                result = RunResult(label, topology, None, arm=arm)
                self._attempt(result, plan.trace, plan, reference=reference, seconds=self.settings.timeout)
            result.trace = Trace(plan.trace)
            if result.asks_for_host and result.status == "ok" and plan.is_untouched:
                self._check_last_host(result, plan)
            if left := {host for host, status in result.statuses.items() if status == "exited"}:
                result.cut = left - {host for host, _ in result.trace.of("end")}
            outcome = result.status
        finally:
            result.seconds = time.monotonic() - started
            self.limit.leave(label)
            self._progress.run_ended(label, outcome)
        return result

    def _without_onednn(self, result: RunResult) -> Told | None:
        """Switch oneDNN off for all further runs, and say so, where it has ended this one: GPUs need not fail."""
        errors = "\n".join([result.failure or "", *result.raised.values()])
        if not any(re.search(pattern, errors) for pattern in _OF_ONEDNN):
            return None
        with self._lock:
            is_on = _ONEDNN not in self._environment
            self._environment[_ONEDNN] = "0"
        if is_on:
            self._parents.replace(self._parents.current, _ONEDNN, "0")
        return _ONEDNN_OFF

    def _crash(self, result: RunResult) -> Told | None:
        """Say what crashed if a memory error ended a host: a crash inside TensorFlow may not recur."""
        for host, code in sorted(result.codes.items()):
            if result.statuses.get(host) == "killed" and code in _FAULTS_OF_MEMORY and not self.settings.faults:
                what = f"host {host} was ended by {signal.Signals(-code).name}, a crash of TensorFlow or another library in C"
                return _REPEATED.format(result.label, what)
        return None

    def _check_last_host(self, result: RunResult, plan: ProbePlan) -> None:
        """Run a program that asks for the number of its host with another number, and see that it trains the same."""
        last = result.topology.num_hosts - 1
        other = RunResult(f"{result.label} as host {last}", result.topology, None)
        self._progress.run_started(other.label, plan.steps)
        plan = replace(plan, trace=self._folder_of(other.label), asks=False, steps=self.limit.decided or plan.steps)
        self._attempt(other, plan.trace, plan, reference=False, seconds=self.settings.timeout, virtual_host=last)
        self._progress.run_ended(other.label, other.status)
        other.trace = Trace(plan.trace)
        check_same_hosts(result, other)

    def _attempt(
        self, result: RunResult, folder: Path, plan: ProbePlan | None, *, reference: bool, seconds: float, virtual_host: int = 0
    ) -> None:
        if plan is not None:
            self._describe(result, plan, reference)
        entry, preload = self._entry(plan, reference), self._parents.current
        if result.arm is not None:
            entry = replace(entry, program=replace(entry.program, args=result.arm.args))
            # What TensorFlow reads when it is imported must be there before.
            preload = self._parents.bare if read_at_import(dict(result.arm.environment)) else preload
        own_hashes = plan is not None and plan.host_variation == "hashes"
        cluster_plan = self._cluster_plan(result.topology, folder, entry, reference, own_hashes=own_hashes)
        environment = {**cluster_plan.environment, **dict(result.arm.environment if result.arm is not None else ())}
        cluster_plan = replace(cluster_plan, virtual_host=virtual_host, environment=environment)
        watch = self._follow(result, preload, cluster_plan, seconds)
        if watch.late_setting is not None and preload.imports:
            self._parents.replace(preload, *watch.late_setting)
            result.notes.clear()
            result.written.clear()
            result.read.clear()
            self._attempt(result, folder, plan, reference=reference, seconds=seconds, virtual_host=virtual_host)
            return
        self.started.note_meetings(result)

    def _follow(self, result: RunResult, preload: Preload, plan: ClusterPlan, seconds: float) -> RunWatch:
        if not result.is_evaluated:
            self.started.add(result)
        with self._lock:
            self.evaluations += result.is_evaluated
        with preload.launch(plan) as cluster:
            watch = RunWatch(cluster, result, plan.directory, self._stopping, self._progress, limit=self.limit)
            watch.follow(seconds)
        with self._lock:
            self._notes.update(dict.fromkeys(cluster.notes))
        return watch

    def _entry(self, plan: ProbePlan | None, reference: bool) -> RecordedProgram:
        settings = self.settings
        program = settings.program
        if reference and settings.reference_args is not None:
            program = replace(program, args=settings.reference_args)
        return RecordedProgram(program, plan, settings.seed, settings.precision, settings.device, self._begun)

    def _cluster_plan(
        self,
        topology: Topology,
        folder: Path,
        entry: RecordedProgram | Evaluation | Counting | Joining,
        reference: bool,
        *,
        own_hashes: bool = False,
    ) -> ClusterPlan:
        settings = self.settings
        return ClusterPlan(
            topology=topology,
            entry=entry,
            directory=folder,
            device=settings.device,
            environment=COMPARABLE_ON_GPUS if settings.device == "gpu" else dict(self._environment),
            all_reduce=settings.all_reduce,
            network=settings.network,
            tf_config=settings.tf_config if reference else None,
            reference=reference,
            own_hashes=own_hashes,
            views=(Path.cwd(), *settings.program.folders),
            cwd=Path.cwd(),
        )

    def _describe(self, result: RunResult, plan: ProbePlan, reference: bool) -> None:
        settings = self.settings
        about = {
            "topology": str(result.topology),
            **({"virtual": True} if result.topology.is_virtual else {}),
            "program": settings.program.name,
            "role": "reference" if reference else "topology",
            "label": result.label,
            "seed": settings.seed,
            "steps": plan.steps,
            "precision": settings.precision,
            "device": settings.device,
            "versions": dict(settings.versions),
        }
        Trace.describe(plan.trace, about)


_STARTED_AGAIN = told("started-for-noise")("To measure rounding, gpudist started the program again, because {}.")
_REPEATED = told("run-repeated")("The run '{}' was repeated: {}.")
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
_EMPTY = r"\[0(,\d+)+\]"
_OF_ONEDNN = (
    rf"{_EMPTY} (!=|vs\.) [^\[]*{_EMPTY}",
    rf"Must provide as many biases as the last dimension .*\[\d+\] vs\. {_EMPTY}",
    r"incompatible with the layer: expected axis .* received input with shape \(0, \d+",
    r"Check failed: dtype\(\) == expected_dtype",
)
"""Errors of oneDNN on a replica without examples (TensorFlow 2.21).

Its convolution has the shape of its input; what follows raises, or ends the process.
"""
_ONEDNN_OFF = told("onednn-off")(
    f"gpudist switched TensorFlow's oneDNN kernels off ({_ONEDNN}=0) and ran the program again: it had failed as these kernels "
    "make it fail on a replica without examples. GPUs do not have them."
)
_FAULTS_OF_MEMORY = (-signal.SIGSEGV, -signal.SIGBUS)


def _goes_on(cluster: RunningCluster, result: RunResult) -> bool:
    """Return whether a scheduler would restart it: it asked for that, or a fault made it fail or stand still."""
    return asks_to_go_on(cluster) or (result.status == "hung" and bool(cluster.faults.now))
