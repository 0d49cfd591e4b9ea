"""Say how runs ended and what they reached, and judge runs whose reference did not end well: only their ends are known."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from emulate.told import Told, told
from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.shared_files import SHARED_FILES
from emulate.verify.judge import judge
from emulate.verify.lab import Lab
from emulate.verify.recorded import Recorded, RunPair
from emulate.verify.recovery import Recovery
from emulate.verify.result import Met, Outcome, RunResult, error_line
from emulate.verify.verdict import OF_REFERENCE, Reference, Run, StepsRun


def with_faults(judged: Run, recovery: Recovery) -> Run:
    """Return a judged run with the results of the faults."""
    last = recovery.lives.last
    reports = recovery.reports()
    if any(cause.code == SHARED_FILES.code and not cause.allowed for cause in judged.causes):
        reports = tuple(replace(report, result=None, error=None) for report in reports)
    judged = replace(judged, faults=reports)
    if recovery.has_ended or judged.failure is not None:
        return judged
    notes = [note for note in last.notes if note not in judged.notes]
    return replace(judged, failure=last.failure, stacks=last.stacks, notes=(*judged.notes, *notes))


def unjudged(run: RunResult, reference: RunResult) -> Run:
    """Return a run without a judgement. Its all-reduce is the one that the first host reports."""
    strategies = run.trace.of("strategy") if run.trace is not None else []
    return Run(
        topology=str(run.topology),
        verdict="unverified",
        all_reduce=next((str(event["all_reduce"]) for _, event in strategies if event.get("all_reduce")), "none"),
        notes=tuple(dict.fromkeys(run.notes)),
        seconds=run.seconds,
        failure=run.failure,
        stacks=run.stacks,
        details={"hosts": run.hosts} if run.status == "hung" else {},
        steps_run=steps_run(run.trace, reference.trace),
    )


def steps_run(trace: Trace | None, reference: Trace | None) -> StepsRun:
    """Return which steps of a program were run.

    Args:
        trace: Of the run.
        reference: Of the reference, which tells the length of an epoch where the run does not.

    Returns:
        The steps, and what is known of the first epoch.
    """
    if trace is None:
        return StepsRun()
    epochs = [event for run in (trace, reference) if run is not None for _, event in run.of("epoch")]
    batches, examples = (epochs[0]["batches"], epochs[0]["last"]) if epochs else (None, None)
    num_steps = trace.num_steps
    stopped = any(event["reason"] == "steps" for _, event in trace.of("end"))
    return StepsRun(
        last=num_steps - 1 if num_steps else None,
        stopped=stopped,
        epoch_batches=batches,
        last_batch_examples=examples,
        epoch_complete=None if batches is None else num_steps >= batches,
    )


def outcome_of(run: RunResult, reference: RunResult) -> Outcome:
    """Return how a run ended, for the causes."""
    return Outcome(
        failure=run.failure if run.status == "failed" else None,
        raised=run.raised,
        hung=run.reason if run.status == "hung" else None,
        hosts=run.statuses,
        codes=run.codes,
        stacks=run.stacks,
        reference_failure=reference.failure,
        suspect=run.cause if run.status == "hung" else None,
        where=run.where,
        saved=run.saved,
        cut=run.cut | reference.cut,
        hides=run.hides,
        collectives={host: facts.get("collectives", []) for host, facts in run.hosts.items()},
    )


def unseen_code(reference: RunResult) -> list[Told]:
    """Return a note about the code that was not run, because every run stopped at a step."""
    trace = reference.trace
    if trace is None or not any(event["reason"] == "steps" for _, event in trace.of("end")):
        return []
    logs = {report.name.partition("/")[0] for report in trace.reports}
    names = [
        *(["callbacks at the end of an epoch"] if "batch" in logs and "epoch" not in logs else []),
        *(["evaluations"] if not trace.of("evaluation") else []),
    ]
    such = f", such as {' and '.join(names)}," if names else ""
    why = "--steps" if trace.num_steps == trace.about.get("steps", trace.num_steps) else "the end of an epoch"
    return [told("stopped-early")(f"Stopped after {trace.num_steps} steps ({why}). Later code{such} was not checked.")]


_COUNTED = r"(?<=_)\d+\b|\b0x[0-9a-f]+\b"
"""Parts of an error that differ in each process: counters in TensorFlow's names, and memory addresses."""
_OF_PRECISION = told("fails-by-precision")(
    "--precision makes the program fail; without gpudist it runs. It mixes arrays, variables or casts of one float type with "
    "those that Keras makes in another. Remove the option, or use the type of keras.config.floatx()."
)
_WITH_TF_CONFIG = told("reference-with-tf-config")(
    "The run on one device had a TF_CONFIG with one worker, because topologies with several hosts need it. Topologies with one "
    "host have none. Verify them in a separate call, in which the run on one device has none either."
)


def judge_ends(
    lab: Lab, allow: Collection[str], reference: RunResult, runs: Sequence[RunResult]
) -> tuple[list[Run], list[Told]]:
    """Judge the ends of runs whose reference did not end well.

    Args:
        lab: Has made them.
        allow: Codes of causes that do not decide.
        reference: The run on one device.
        runs: Those of the topologies.

    Returns:
        The judged runs, and what may have made the reference fail.
    """
    judged = [_judge_end(run, reference, lab, allow) for run in runs]
    is_mixed = lab.settings.tf_config and not all(run.topology.has_several_hosts for run in runs)
    notes = _without_us(lab, reference)
    if _OF_PRECISION in notes:  # the option makes it fail, and tells nothing of the program
        judged = [replace(run, verdict="unverified") if _fails_by_type(run) else run for run in judged]
    return judged, notes + [_WITH_TF_CONFIG] * is_mixed + _out_of_time(reference)


def _judge_end(run: RunResult, reference: RunResult, lab: Lab, allow: Collection[str]) -> Run:
    """Return the run if the reference failed or hung: only the end of the topology's run is known."""
    ends = "raises" if reference.status == "failed" else "does not end"
    is_well = run.status == "ok"
    if is_well:
        where = Reference(reference.status, topology=str(reference.topology)).where
        run.notes.append(told("nothing-to-compare-with")(f"On {where} the program {ends}; there is nothing to compare with."))
        run.status, run.reason = reference.status, reference.reason
        run.failure, run.stacks = reference.failure, reference.stacks
    nothing = lab.empty_trace(reference)
    met = Met.together((run.met, reference.met))
    case = Case(RunPair(nothing, run.trace or nothing), Recorded(), outcome=outcome_of(run, reference), met=met)
    judged = judge(case, allow).fill(unjudged(run, reference))
    return replace(judged, reason=OF_REFERENCE, failure=None) if is_well else judged


def _without_us(lab: Lab, reference: RunResult) -> list[Told]:
    """Check whether a program that raises on one device also fails without emulation and recording."""
    if reference.status != "failed" or reference.topology.num_ps:  # without TF_CONFIG it would fail by that
        return []
    plain = lab.run_plain(3 * reference.seconds)
    if plain.status != "failed":
        if lab.settings.precision != "float32" and _names_a_type(reference.failure):
            return [_OF_PRECISION]
        how = "ends without an error" if plain.status == "ok" else "had not failed when it was ended"
        what = "what gpudist emulates" if lab.settings.precision == "float32" else "--precision, or what it emulates,"
        with_it = ", with the TF_CONFIG of one worker" if lab.settings.tf_config else ""
        text = f"Without gpudist, on this machine as it is{with_it}, the program {how}: {what} makes it fail."
        return [told("fails-by-emulation")(text)]
    ours, theirs = (error_line(run.failure, "an error").rstrip(".") for run in (reference, plain))
    if ours.startswith("EOFError"):
        return []  # it had no standard input there either
    is_same = re.sub(_COUNTED, "", ours) == re.sub(_COUNTED, "", theirs)
    error = "the same error as on one device" if is_same else f"another error: {theirs}"
    where = ", with the TF_CONFIG of one worker," if lab.settings.tf_config else ""
    return [told("fails-without-gpudist")(f"Without gpudist{where} the program fails too, with {error}.")]


def _out_of_time(reference: RunResult) -> list[Told]:
    """Return what may help a program that was not stuck when its time was over."""
    if reference.reason != "timeout":
        return []
    made = reference.trace.num_steps if reference.trace is not None else 0
    more = "Give fewer --steps, or a longer --timeout" if made else "TensorFlow needs seconds to start: give a longer --timeout"
    return [told("out-of-time")(f"On one device the time was over before step {made + 1}. {more}.")]


def _names_a_type(failure: str | None) -> bool:
    """Return whether an error is about 64-bit types beside others."""
    return re.search(r"\b(float64|double)\b", error_line(failure, "")) is not None


def _fails_by_type(run: Run) -> bool:
    """Return whether a run failed like a reference with a type error, or was to be compared with it."""
    return run.verdict == "failed" and (run.is_of_reference or _names_a_type(run.failure))
