"""Define the public functions: verify a program, compare two recorded runs, and record one run."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.devices import choose_device
from emulate.errors import UsageError
from emulate.evaluate import fixed_batches, refusal
from emulate.faults import Fault, check_for, parse_all
from emulate.program import Program
from emulate.recorder import ProbePlan
from emulate.told import Told, told
from emulate.topology import REFERENCE, REFERENCE_WITH_SERVERS, Topology
from emulate.trace import Trace, check_intact
from emulate.verify.arms import compare_arms
from emulate.verify.case import Case
from emulate.verify.certify import certify
from emulate.verify.checks import NOT_SEEN, check_virtual, lack_of_memory, trace_budget
from emulate.verify.ends import steps_run
from emulate.verify.judge import judge
from emulate.verify.lab import Lab
from emulate.verify.recorded import Recorded, RunPair, trained_otherwise
from emulate.verify.result import Outcome, RunResult, StartedRuns
from emulate.verify.run_spec import Arm
from emulate.verify.runner import Runner
from emulate.verify.session import Session
from emulate.verify.settings import AUTO, Settings, Steps
from emulate.verify.verdict import OF_REFERENCE, Reference, Run, Verdict
from gpudist_core.installed import installed_version, own_version

if TYPE_CHECKING:
    from emulate.cluster import Preload
    from emulate.progress import Progress


def how_it_failed(trace: Trace) -> str | None:
    """Return which hosts raised or stopped recording before their program ended; None if all ended well.

    A host writes how it ended as its last word; one that was killed has none.
    """
    ends = {host: str(event["reason"]) for host, event in trace.of("end")}
    if all(ends.get(host) in ("returned", "steps") for host in range(trace.topology.num_stepping_hosts)):
        return None
    steps = dict.fromkeys(range(trace.topology.num_stepping_hosts), 0)
    for host, event in trace.of("step"):  # several optimizers may make different numbers of steps
        steps[host] = max(steps[host], int(event["step"]) + 1)
    texts = [f"host {host} {_ENDS[ends.get(host, '')]} after {steps[host]} steps" for host in sorted(steps)]
    whose = "reference's" if trace.about.get("role") == "reference" else "recorded"
    return f"The {whose} run did not end well: {', '.join(texts)}."


_ENDS = {"returned": "was done", "steps": "had all its steps", "raised": "raised", "": "stopped"}


DEFAULT_TOPOLOGY = "1x4"
SHOWN_PATHS = 8
Program_ = str | os.PathLike[str] | Callable[[], Any] | Program


def verify(
    program: Program_,
    topology: str | Topology | Sequence[str | Topology] = DEFAULT_TOPOLOGY,
    *,
    args: Sequence[str] = (),
    device: str = "auto",
    seed: int = 0,
    steps: Steps = AUTO,
    timeout: float = 300.0,
    network: str = "own",
    all_reduce: str = "auto",
    precision: str = "float32",
    allow: Collection[str] = (),
    strict: bool = False,
    faults: str | Fault | Iterable[str | Fault] = (),
    restarts: int = 3,
    reference_args: Sequence[str] | None = None,
    against: str | None = None,
    virtual: bool = False,
    thorough: bool = False,
    traces: Path | None = None,
    certificate: Path | None = None,
    progress: Progress | None = None,
    preload: Preload | None = None,
) -> Verdict:
    """Verify that a program trains the same model on these topologies as on one device.

    Args:
        program: `train.py`, `train.ipynb`, `-m package.module`, `train.py:function`, `package.module:function`, or a callable
            without required arguments.
        topology: One topology or several: `"1x4"` or `["1x4", "2x2"]`.
        args: The program's command-line arguments.
        device: `cpu`; `gpu`: this machine's GPUs, also for the reference, split if there are fewer than devices; or `auto`:
            GPUs if every device of every topology can have its own.
        seed: The seed for Python, NumPy, TensorFlow and Keras on every host.
        steps: Number of training steps to compare, after which the program is stopped. None: all steps. The default `auto`
            compares 20 steps, and continues to the end of the first epoch if it has at most 50 batches and that takes about a
            minute at most.
        timeout: The time limit of one run, in seconds.
        network: `own`: several hosts get a private network, if the system allows it. `host`: this machine's network.
        all_reduce: `auto`, `ring`, `hierarchical` or `one-device`.
        precision: Keras's float type in all runs: `float32` or `float64`.
        allow: Codes of expected causes. They are reported, but do not decide.
        strict: Count the verdict `by-design` as a failure.
        faults: Faults for one more run of each topology, such as `"kill:host=1,step=5"` or `emulate.faults.Kill(host=1,
            step=5)`. The verdict tells whether the program continues to its end with the same result.
        restarts: How often all hosts are restarted in that run, if a fault ends them or they exit with code 75.
        reference_args: The program's arguments in the reference run. Default: `args`.
        against: Other arguments or environment of the program, such as `"--xla NAME=value"`. The program is compared with the
            program so started, on the same topology and at the same weights, instead of with itself on one device.
        virtual: Let all replicas take turns in one process, each with its own examples, and sum their gradients by arithmetic.
            For topologies of up to 4096 replicas, such as `1x1024` or `128x8`.
        thorough: Look for causes without a limit. Default: that ends, for each topology, after 6 starts of the program or 40
            evaluations of its steps.
        traces: An empty folder for what every run records. Default: nothing is kept.
        certificate: A file for the first steps, with which `gpudist_core.check` compares a real run. It needs one topology, and
            is written only for the verdicts `equivalent` and `by-design`. A note says so, or says why there is none.
        progress: An object that is told about every run and step.
        preload: A running pre-loaded parent, for several verifications one after the other.

    Returns:
        The verdict on each topology.

    Raises:
        UsageError: If an argument is not valid. The text says what to do.
        Unavailable: If this machine cannot run the emulation, or lacks the requested GPUs.

    Example:
        >>> verdict = verify("train.py", topology=["1x4", "2x2"])  # doctest: +SKIP
        >>> verdict.is_equivalent  # doctest: +SKIP
        True
    """
    from emulate.progress import Silent

    topologies = _topologies(topology, is_virtual=virtual)
    _check(steps, timeout)
    wanted_faults = _faults(faults, restarts, topologies)
    if certificate is not None:
        _check_certifiable(topologies, precision)
    if virtual:
        check_virtual(topologies, wanted_faults, device, all_reduce)
    others = {"--virtual": virtual, "--fault": faults, "--certificate": certificate, "--reference-arg": reference_args}
    others |= {"--allow unexplained": "unexplained" in allow, "parameter servers": any(each.num_ps for each in topologies)}
    if against is not None and (given := [name for name, value in others.items() if value]):
        raise UsageError(f"--against must stand without {given[0]}. Received: --against {against!r}. Leave one of them out.")
    choice = choose_device("cpu" if virtual else device, topologies)
    resolved = program if isinstance(program, Program) else Program.find(program, args)
    arm = None if against is None else Arm.parse(against, resolved.args)
    lacking = {**lack_of_memory(topologies), **choice.lacking}
    fitting = [topology for topology in topologies if topology not in lacking]
    folder = Path(tempfile.gettempdir()) if traces is None else traces.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    settings = Settings(
        program=resolved,
        seed=seed,
        steps=steps,
        timeout=timeout,
        device=choice.kind,
        network=network,
        all_reduce=all_reduce,
        precision=precision,
        budget=trace_budget(existing, fitting),
        tf_config=any(topology.has_several_hosts for topology in fitting),
        reference_args=None if reference_args is None else tuple(reference_args),
        versions=versions(),
        faults=wanted_faults,
        restarts=restarts,
        thorough=thorough,
    )
    with Runner(settings, traces.absolute() if traces else None, progress or Silent(), preload=preload) as runner:
        if arm is None:
            reference, runs, notes = _judge_all(runner, resolved.name, seed, allow, fitting, certificate)
        else:
            reference, runs, notes = compare_arms(runner, seed, fitting, arm)
        notes += [
            *([NOT_SEEN] if virtual else []),
            *(told("not-run-in-notebook")(note) for note in resolved.notes),
            *(told("device-chosen")(why) for why in [choice.why] if why),
            *runner.notes(),
            *_meetings(runner.started),
        ]
    judged = iter(runs)
    every = [
        Run(str(topology), "unavailable", all_reduce="none", notes=(lacking[topology],))
        if topology in lacking
        else next(judged)
        for topology in topologies
    ]
    if certificate is not None and lacking:
        notes.append(certify(None, every[0], certificate))
    fields = (resolved.name, seed, choice.kind, dict(settings.versions), reference, tuple(every), tuple(notes))
    return Verdict(*fields, strict=strict, program_starts=len(runner.started), evaluations=runner.evaluations)


_OF_SERVERS = told("reference-with-servers")(
    f"Topologies with parameter servers are compared with one worker and one server ({REFERENCE_WITH_SERVERS})."
)


def _judge_all(
    runner: Runner, program: str, seed: int, allow: Collection[str], topologies: Sequence[Topology], certificate: Path | None
) -> tuple[Reference, list[Run], list[Told]]:
    """Return what the (first) reference did, the verdict on each topology, and what holds for all of them."""
    references: list[Reference] = []
    runs: dict[Topology, Run] = {}
    notes: list[Told] = []
    for place in (REFERENCE, REFERENCE_WITH_SERVERS):
        wanted = [topology for topology in topologies if bool(topology.num_ps) == bool(place.num_ps)]
        if not wanted:
            continue
        session = Session(Lab(runner, seed, place), program, allow)
        reference, judged, own_notes = session.judge(wanted)
        if certificate is not None:
            own_notes = [*own_notes, certify(session.evidence(wanted[0]), judged[0], certificate)]
        references.append(reference)
        runs |= dict(zip(wanted, judged, strict=True))
        notes += own_notes
    if references[1:]:
        notes.append(_OF_SERVERS)
    first = references[0] if references else Reference("none")
    return first, [runs[topology] for topology in topologies], list(dict.fromkeys(notes))


def _check_certifiable(topologies: Sequence[Topology], precision: str) -> None:
    """Raise UsageError where a certificate would not be that of the real run."""
    if len(topologies) > 1 or topologies[0].num_ps or precision != "float32":
        names = [str(topology) for topology in topologies]
        raise UsageError(
            "A certificate is made of one topology of workers, in float32. "
            f"Received: topology={names}, precision={precision!r}. Verify each topology by itself, with its own file."
        )


def _faults(faults: str | Fault | Iterable[str | Fault], restarts: int, topologies: Sequence[Topology]) -> tuple[Fault, ...]:
    """Return the faults, after checking that every topology can have each of them."""
    wanted_faults = parse_all(faults)
    if restarts < 0:
        raise UsageError(f"A number of restarts must not be negative. Received: restarts={restarts}. Use 0 for none.")
    for topology in topologies if wanted_faults else ():
        check_for(wanted_faults, topology)
        if topology.num_ps:
            raise UsageError(
                f"A run with faults is compared where every host makes steps. Received: topology={str(topology)!r}, faults="
                f"{[str(fault) for fault in wanted_faults]}, where the chief alone makes them. "
                "Use `gpudist run --fault`, or leave the servers out."
            )
    return wanted_faults


def _meetings(started: StartedRuns) -> list[Told]:
    """Return what the user should know about paths that several runs share."""
    where = "outside of the working directory and the program's folder"
    risk = "where no run has files of its own and one may have found what another left"
    met = told("shared-paths")(f"Several runs wrote the same paths {where}, {risk}: {{}}.")
    lost = told("files-changed")(
        f"Runs overwrote, changed or removed files {where} that were there before, and they stay so: {{}}."
    )
    return [what.format(_shown(some)) for what, some in ((met, started.meetings()), (lost, started.replaced())) if some]


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
    return ", ".join(paths[:SHOWN_PATHS]) + more


def compare_traces(reference: Path, topology: Path, *, allow: Collection[str] = ()) -> Run:
    """Compare two recorded runs, made here or on another machine.

    Noise runs recorded beside the reference (`noise-1`, ...) give the noise floor. Without them it is a few units in the last
    place.

    Args:
        reference: The folder of a run on one device.
        topology: The folder of the run to judge.
        allow: Codes of causes that do not decide.

    Returns:
        The verdict on the second run. It is `failed` if one of them raised or was ended during the recording.

    Raises:
        UsageError: If a folder, or one of the noise runs, is not a trace or is damaged.
    """
    first, second = _trace(reference), _trace(topology)
    failure, of_reference = how_it_failed(second), how_it_failed(first)
    failed = failure or of_reference
    noise = Recorded([_trace(folder) for folder in _noise_beside(reference)])
    case = Case(RunPair(first, second), noise, outcome=Outcome(failed))
    steps = steps_run(second, first)
    run = judge(case, allow).fill(Run(topology=str(second.topology), verdict="unverified", failure=failed, steps_run=steps))
    return replace(run, reason=OF_REFERENCE) if of_reference and not failure else run


def changes_of_training(reference: Path, other: Path) -> str | None:
    """Return what makes two recorded runs on one device train other models, beyond rounding.

    Args:
        reference: The folder of the first run.
        other: The folder of the second.

    Returns:
        Initial weights, examples, numbers drawn, steps, losses or updates, in words; None where all agree in each step.

    Raises:
        UsageError: If a folder is not a trace or is damaged.
    """
    return trained_otherwise(_trace(reference), _trace(other))


def _noise_beside(reference: Path) -> list[Path]:
    """Return the folders of the noise runs: `noise-1` beside `reference`, `noise-1-keyed` beside `reference-keyed`."""
    variation = re.escape(reference.resolve().name.removeprefix("reference"))
    folders = sorted(reference.resolve().parent.glob("noise-*"))
    return [
        folder
        for folder in folders
        if re.fullmatch(rf"noise-\d+{variation}", folder.name) and (folder / "trace.json").is_file()
    ]


def _trace(folder: Path) -> Trace:
    if not (folder / "trace.json").is_file():
        raise UsageError(
            f"A trace is a folder with trace.json in it. Received: trace={str(folder)!r}. "
            "Record some with `gpudist verify PROGRAM --traces DIR` and name DIR/reference or DIR/1x4."
        )
    try:
        trace = Trace(folder)
        check_intact(trace)
        return trace
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"A trace must not be damaged. Received: trace={str(folder)!r} ({error}). "
            "Copy the whole folder again, or record it anew with `gpudist verify PROGRAM --traces DIR`."
        ) from error


def versions() -> dict[str, str]:
    """Return the versions of what decides a result."""
    return {"gpudist": own_version(), **{name: str(installed_version(name)) for name in ("tensorflow", "keras")}}


def _topologies(wanted: str | Topology | Sequence[str | Topology], *, is_virtual: bool) -> list[Topology]:
    several = [wanted] if isinstance(wanted, (str, Topology)) else list(wanted)
    parsed = (Topology.parse(topology, is_virtual=is_virtual) for topology in several or [DEFAULT_TOPOLOGY])
    return list(dict.fromkeys(replace(topology, is_virtual=is_virtual) for topology in parsed))


def _check(steps: Steps, timeout: float) -> None:
    if isinstance(steps, str) and steps != AUTO:
        raise UsageError(f"steps must be a positive integer, None for all steps, or 'auto'. Received: steps={steps!r}.")
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"steps must be >= 1. Received: steps={steps}. None compares all steps.")
    if timeout <= 0:
        raise UsageError(f"timeout must be > 0, in seconds. Received: timeout={timeout}.")


def record(
    program: Program, folder: Path, operations: Path, *, steps: int, timeout: float, progress: Progress
) -> tuple[RunResult, tuple[Told, ...]]:
    """Record a program on one device of the CPU, and count the operations and the live bytes of its step.

    Args:
        program: What to run.
        folder: An existing folder for the trace.
        operations: The file for the operations. None is written where the steps are not in a graph.
        steps: After how many steps it is stopped.
        timeout: The time limit in seconds.
        progress: Told of the run.

    Returns:
        How the run went, and what the user should know about it.
    """
    settings = Settings(program=program, steps=steps, timeout=timeout)
    with Runner(settings, folder, progress) as runner:
        runner.expect(2)
        plan = ProbePlan(folder, keeps_functions=True, times_input=True)
        result = runner.start("one device", REFERENCE, plan, reference=True).result()
        if result.status == "ok" and result.trace is not None and refusal(result.trace) is None:
            half = _with_half_the_batch(runner, folder) if fixed_batches(result.trace) else None
            runner.count_operations(result, half, operations)
        return result, tuple(runner.notes())


def _with_half_the_batch(runner: Runner, folder: Path) -> RunResult | None:
    """Run the program with half of each batch: its graphs show which tensors grow with it. None where that is not possible."""
    plan = ProbePlan(folder, keeps_functions=True, halves=True)
    result = runner.start("half the batch", REFERENCE, plan, reference=True).result()
    return result if result.status == "ok" and result.trace is not None and refusal(result.trace) is None else None
