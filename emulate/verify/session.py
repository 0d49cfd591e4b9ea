"""A verification: which runs are made, in which order, and what is compared with what."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import WrongUse
from emulate.probe import ProbePlan, Replay, Trace
from emulate.program import Program
from emulate.topology import REFERENCE, Topology
from emulate.verify.case import Case, Outcome, Rerun
from emulate.verify.compare import compare
from emulate.verify.judge import judge
from emulate.verify.ledger import ledgers
from emulate.verify.runner import Runner, RunResult, Settings
from emulate.verify.verdict import Reference, Run, Verdict

if TYPE_CHECKING:
    from emulate.report.progress import Progress

NOISE_RUNS = 3
CONFIRMING_RUNS = 4
CONFIRMING_ULPS = 16.0
DEFAULT_TOPOLOGY = "1x4"
Program_ = str | os.PathLike[str] | Callable[[], Any] | Program


def verify(
    program: Program_,
    topology: str | Topology | Sequence[str | Topology] = DEFAULT_TOPOLOGY,
    *,
    args: Sequence[str] = (),
    device: str = "auto",
    seed: int = 0,
    steps: int | None = 20,
    timeout: float = 300.0,
    network: str = "own",
    all_reduce: str = "auto",
    precision: str = "float32",
    allow: Collection[str] = (),
    reference_args: Sequence[str] | None = None,
    traces: Path | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Find out whether a program trains the same model on these topologies as on one device.

    Args:
        program: `train.py`, `-m package.module`, `train.py:function`, `package.module:function`, or a callable that
            needs no arguments.
        topology: One topology or several, `"1x4"` or `["1x4", "2x2"]`.
        args: The program's command-line arguments.
        device: `cpu`, or `auto`, which is the same until real devices can be verified.
        seed: Seeds Python, NumPy, TensorFlow and Keras on every host before the program starts.
        steps: Training steps to compare, None for all; the program is ended there.
        timeout: Seconds that one run may take.
        network: `own` gives clusters of several hosts a network of their own where the system allows it; `host` does not.
        all_reduce: `auto`, `ring`, `hierarchical` or `one-device`.
        precision: `float32` or `float64`, Keras's float type in all runs.
        allow: Codes of causes that are expected: reported, but they do not decide.
        reference_args: Arguments of the program in the reference run, `args` unless given.
        traces: An empty folder that keeps what every run recorded; nothing is kept unless given.
        progress: Told of every run and step.

    Raises:
        WrongUse: When an argument cannot be meant; the text says what to do.
        Unavailable: When this machine cannot run the emulation at all.

    Example:
        >>> verdict = verify("train.py", topology=["1x4", "2x2"])  # doctest: +SKIP
        >>> verdict.is_equivalent  # doctest: +SKIP
        True
    """
    from emulate.report.progress import Silent

    topologies = _topologies(topology)
    _check(device, steps, timeout)
    found = program if isinstance(program, Program) else Program.find(program, args)
    settings = Settings(
        program=found,
        seed=seed,
        steps=steps,
        timeout=timeout,
        network=network,
        all_reduce=all_reduce,
        precision=precision,
        tf_config=any(one.has_several_hosts for one in topologies),
        reference_args=None if reference_args is None else tuple(reference_args),
        versions=versions(),
    )
    with _folder(traces) as folder, Runner(settings, folder, progress or Silent()) as runner:
        reference, runs = Session(settings, runner, allow).judge(topologies)
    return Verdict(found.name, seed, "cpu", dict(settings.versions), reference, tuple(runs))


def assert_equivalent(program: Program_, topology: str | Topology | Sequence[str | Topology] = DEFAULT_TOPOLOGY, **options: Any) -> None:
    """Raise AssertionError with the report unless the program trains the same model on every topology.

    Args:
        program: As for `verify`.
        topology: As for `verify`.
        **options: As for `verify`.

    Raises:
        AssertionError: With the whole report as its text.
    """
    from emulate.report import render

    verdict = verify(program, topology, **options)
    if not verdict.is_equivalent:
        raise AssertionError(render(verdict))


def compare_traces(reference: Path, topology: Path, *, allow: Collection[str] = ()) -> Run:
    """Compare two recorded runs, made here or on another machine.

    Noise runs recorded beside the reference (`noise-1`, ...) give the noise floor; without them it is a few units in
    the last place.

    Raises:
        WrongUse: When a folder is not a trace.
    """
    first, second = _trace(reference), _trace(topology)
    noise = [Trace(folder) for folder in sorted(reference.parent.glob("noise-*")) if (folder / "trace.json").exists()]
    case = Case(first, second, noise)
    return judge(case, allow).fill(Run(topology=str(second.topology), verdict="unverified"))


def _trace(folder: Path) -> Trace:
    if not (folder / "trace.json").is_file():
        raise WrongUse(
            f"A trace is a folder with trace.json in it. Received: trace={str(folder)!r}. "
            "Record some with `gpudist verify PROGRAM --traces DIR` and name DIR/reference or DIR/1x4."
        )
    try:
        return Trace(folder)
    except (ValueError, KeyError) as error:
        raise WrongUse(f"A trace must be readable. Received: trace={str(folder)!r}: {error}") from error


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    found = {}
    for package in ("gpudist", "tensorflow", "keras"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _topologies(wanted: str | Topology | Sequence[str | Topology]) -> list[Topology]:
    several = [wanted] if isinstance(wanted, (str, Topology)) else list(wanted)
    return list(dict.fromkeys(Topology.parse(one) for one in several or [DEFAULT_TOPOLOGY]))


def _check(device: str, steps: int | None, timeout: float) -> None:
    if device not in ("auto", "cpu"):
        raise WrongUse(f"A verification runs on device 'cpu' (or 'auto', the same). Received: device={device!r}.")
    if steps is not None and steps < 1:
        raise WrongUse(f"At least one step must be compared. Received: steps={steps}. None compares all.")
    if timeout <= 0:
        raise WrongUse(f"A run needs time. Received: timeout={timeout}. Give a positive number of seconds.")


class _folder:  # noqa: N801 - used as a function
    """The folder of all runs: the user's, which stays, or a temporary one, which does not."""

    def __init__(self, kept: Path | None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="gpudist-", ignore_cleanup_errors=True) if kept is None else None
        self._path = kept.absolute() if kept is not None else Path(self._temporary.name if self._temporary else "")

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *exc: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


@dataclass
class _Yardstick:
    """A reference with its noise runs."""

    reference: Future[RunResult]
    noise: list[Future[RunResult]] = field(default_factory=list)

    def traces(self) -> tuple[Trace, list[Trace]] | None:
        """Its traces, None where the program raised or recorded nothing."""
        reference = self.reference.result()
        if reference.status != "ok" or reference.trace is None:
            return None
        noise = [run.result() for run in self.noise]
        return reference.trace, [run.trace for run in noise if run.status == "ok" and run.trace is not None]


class Session:
    """The runs of one verification.

    Args:
        settings: What is the same for all runs.
        runner: Makes them.
        allow: Codes of causes that do not decide.
    """

    def __init__(self, settings: Settings, runner: Runner, allow: Collection[str]) -> None:
        self._settings = settings
        self._runner = runner
        self._allow = allow
        self._yardsticks: dict[Any, _Yardstick] = {}

    def judge(self, topologies: Sequence[Topology]) -> tuple[Reference, list[Run]]:
        """Make the runs and judge each topology."""
        first = self._untouched(topologies[0])
        reference = self._runner.start("reference", REFERENCE, ProbePlan(trace=Path(), seed=self._settings.seed), reference=True)
        plain = reference.result()
        repeat = self._again(plain)
        self._keyed = _draws_numbers(plain)
        self._yardsticks[ProbePlanKey()] = _Yardstick(reference)
        self._base = self._yardstick(ProbePlanKey(keyed_draws=self._keyed))
        others = [self._untouched(topology) for topology in topologies[1:]]
        runs = [self._judge_one(run.result(), plain, repeat) for run in [first, *others]]
        return _reference_summary(plain, repeat), runs

    def _untouched(self, topology: Topology) -> Future[RunResult]:
        return self._runner.start(str(topology), topology, ProbePlan(trace=Path(), seed=self._settings.seed))

    def _again(self, plain: RunResult) -> Future[RunResult] | None:
        if plain.status != "ok":
            return None
        plan = ProbePlan(trace=Path(), seed=self._settings.seed)
        return self._runner.start("reference again", REFERENCE, plan, reference=True)

    def _yardstick(self, key: ProbePlanKey) -> _Yardstick:
        """The reference run in this way, with its noise runs; made once."""
        known = self._yardsticks.get(key)
        if known is None:
            known = _Yardstick(self._runner.start(f"reference{key.suffix}", REFERENCE, key.plan(self._settings.seed), reference=True))
            self._yardsticks[key] = known
        if not known.noise:
            known.noise = [self._noise(key, k + 1, 1.0) for k in range(NOISE_RUNS)]
        return known

    def _noise(self, key: ProbePlanKey, number: int, ulps: float) -> Future[RunResult]:
        plan = replace(key.plan(self._settings.seed), permute=True, perturb=ulps, noise_seed=number)
        return self._runner.start(f"noise {number}{key.suffix}", REFERENCE, plan, reference=True)

    def _judge_one(self, run: RunResult, plain: RunResult, repeat: Future[RunResult] | None) -> Run:
        shell = Run(
            topology=str(run.topology),
            verdict="unverified",
            all_reduce=_all_reduce(run),
            notes=tuple(run.notes),
            seconds=run.seconds,
            failure=run.failure,
            stacks=run.stacks,
        )
        if run.status == "ok" and run.xla:
            run, shell = self._as_written(run, shell)
        if plain.status != "ok":
            return self._without_reference(run, plain, shell)
        case = self._case(run, plain, repeat)
        return judge(case, self._allow).fill(shell)

    def _as_written(self, run: RunResult, shell: Run) -> tuple[RunResult, Run]:
        """A step compiled by XLA was recorded without it; does it run with it?"""
        plain = self._runner.start_unprobed(f"{run.topology} as written", run.topology, 3 * run.seconds).result()
        if plain.status == "ok":
            return run, replace(shell, notes=(*shell.notes, "run once as written, with XLA: it did not fail"))
        run.status, run.failure = plain.status, plain.failure
        return run, replace(shell, failure=plain.failure, notes=(*shell.notes, "with XLA, as it is written, it fails"))

    def _without_reference(self, run: RunResult, plain: RunResult, shell: Run) -> Run:
        """The reference failed: the topology's own end is all that can be said."""
        case = Case(plain.trace or _empty(run), run.trace or _empty(run), outcome=_outcome(run, plain))
        if run.status != "ok":
            note = f"On one device it {'raises' if plain.status == 'failed' else 'hangs'} too."
            return judge(case, self._allow).fill(replace(shell, notes=(*shell.notes, note)))
        word = "failed" if plain.status == "failed" else "hung"
        text = "On one device the program raises; there is nothing to compare with." if word == "failed" else plain.where
        return replace(
            shell, verdict=word, failure=plain.failure, reason=plain.reason, stacks=plain.stacks, notes=(*shell.notes, text)
        )

    def _case(self, run: RunResult, plain: RunResult, repeat: Future[RunResult] | None) -> Case:
        assert plain.trace is not None
        assert run.trace is not None
        again = repeat.result() if repeat is not None else None
        topology = self._keyed_topology(run) if self._keyed and run.status == "ok" else run
        compared = topology.trace or run.trace
        base = self._reference_for(run, plain, compared)
        traces = base.traces() or (plain.trace, [])
        key = next(key for key, yardstick in self._yardsticks.items() if yardstick is base)
        return Case(
            traces[0],
            compared,
            traces[1],
            repeat=again.trace if again is not None and again.status == "ok" else None,
            untouched=run.trace,
            rerun=lambda switch: self._rerun(switch, run, key),
            confirm=lambda: self._confirm(key),
            outcome=_outcome(run, plain),
        )

    def _keyed_topology(self, run: RunResult) -> RunResult:
        plan = ProbePlan(trace=Path(), seed=self._settings.seed, keyed_draws=True)
        return self._runner.start(f"{run.topology} keyed", run.topology, plan).result()

    def _reference_for(self, run: RunResult, plain: RunResult, compared: Trace) -> _Yardstick:
        """The plain reference; for a batch that grows with the replicas, the replay that explains the run best."""
        assert plain.trace is not None
        if run.status != "ok" or not any(ledger.grows for ledger in ledgers(plain.trace, compared).values()):
            return self._base
        run.notes.append("The batch grows with the replicas; one device was given the same rows for each step.")
        keys = [ProbePlanKey(keyed_draws=self._keyed, replay=Replay(compared.directory, accumulate)) for accumulate in (False, True)]
        candidates = [self._yardstick(key) for key in keys]
        return min(candidates, key=lambda candidate: _misfit(candidate, compared))

    def _rerun(self, switch: str, run: RunResult, base: ProbePlanKey) -> Rerun | None:
        """Both sides again with one suspect switched off, or the reference on the topology's rows."""
        if run.trace is None or run.status != "ok":
            return None
        if switch == "replay":
            key = replace(base, replay=Replay(run.trace.directory))
            traces = self._yardstick(key).traces()
            return None if traces is None else Rerun(traces[0], run.trace, traces[1])
        keyed = switch == "no-dropout"
        key = replace(base, keyed_draws=base.keyed_draws or keyed, switches=base.switches | ({switch} if not keyed else set()))
        again = self._runner.start(f"{run.topology}{key.suffix}", run.topology, replace(key, replay=None).plan(self._settings.seed))
        traces = self._yardstick(key).traces()
        result = again.result()
        if traces is None or result.status != "ok" or result.trace is None:
            return None
        return Rerun(traces[0], result.trace, traces[1])

    def _confirm(self, key: ProbePlanKey) -> list[Trace]:
        """Noise runs with a larger perturbation, to see whether a small difference is a unit on its kink."""
        runs = [self._noise(key, NOISE_RUNS + k + 1, CONFIRMING_ULPS) for k in range(CONFIRMING_RUNS)]
        return [run.trace for run in (one.result() for one in runs) if run.status == "ok" and run.trace is not None]


@dataclass(frozen=True)
class ProbePlanKey:
    """In what a reference run differs from the program as it stands."""

    keyed_draws: bool = False
    switches: frozenset[str] = frozenset()
    replay: Replay | None = None

    def plan(self, seed: int) -> ProbePlan:
        """The probe's plan for it."""
        return ProbePlan(trace=Path(), seed=seed, keyed_draws=self.keyed_draws, switches=self.switches, replay=self.replay)

    @property
    def suffix(self) -> str:
        """What its runs' labels end with."""
        parts = [*(["keyed"] if self.keyed_draws else []), *sorted(self.switches)]
        if self.replay is not None:
            parts.append(("shares of " if self.replay.accumulate else "rows of ") + self.replay.trace.name)
        return "".join(f" {part}" for part in parts)


def _draws_numbers(run: RunResult) -> bool:
    """Whether the program draws random numbers inside its steps."""
    trace = run.trace
    if trace is None:
        return False
    return any(step.draws for name in trace.optimizers for replicas in trace.steps(name) for step in replicas.values())


def _misfit(yardstick: _Yardstick, topology: Trace) -> float:
    """How badly a reference explains a run: its largest error in units of the noise."""
    traces = yardstick.traces()
    if traces is None:
        return float("inf")
    comparison = compare(traces[0], topology, traces[1])
    worst = comparison.worst
    return 0.0 if worst is None else worst.error / max(worst.noise, 1e-300)


def _all_reduce(run: RunResult) -> str:
    """Which all-reduce ran, as the first host told."""
    if run.trace is None:
        return "auto"
    return next((str(event["all_reduce"]) for _, event in run.trace.of("strategy") if event.get("all_reduce")), "auto")


def _outcome(run: RunResult, plain: RunResult) -> Outcome:
    return Outcome(
        failure=run.failure if run.status == "failed" else None,
        hung=run.reason if run.status == "hung" else None,
        hosts=run.statuses,
        codes=run.codes,
        stacks=run.stacks,
        reference_failure=plain.failure,
    )


def _empty(run: RunResult) -> Trace:
    """A trace without events, for a run that left none."""
    folder = Path(tempfile.mkdtemp(prefix="gpudist-"))
    Trace.describe(folder, {"topology": str(run.topology)})
    return Trace(folder)


def _reference_summary(plain: RunResult, repeat: Future[RunResult] | None) -> Reference:
    if plain.status != "ok" or plain.trace is None:
        return Reference(plain.status, 0, True, plain.failure)
    again = repeat.result() if repeat is not None else None
    repeatable = again is None or again.trace is None or _same_weights(plain.trace, again.trace)
    return Reference("ok" if plain.trace.num_steps else "none", plain.trace.num_steps, repeatable)


def _same_weights(one: Trace, other: Trace) -> bool:
    """Whether two runs ended with bitwise the same weights."""

    def digests(trace: Trace) -> list[dict[str, str]]:
        return [{name: v.digest for name, v in found.items()} for found in trace.variables("final").values()]

    return digests(one) == digests(other)
