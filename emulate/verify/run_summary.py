"""Say how a run went, for its verdict and its case."""

from __future__ import annotations

from dataclasses import replace

from emulate.told import Told, told
from emulate.trace import Trace
from emulate.verify.causes.shared_files import SHARED_FILES
from emulate.verify.recovery import Recovery
from emulate.verify.result import Outcome, RunResult
from emulate.verify.verdict import Run, StepsRun


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


def same_weights(one: Trace, other: Trace) -> bool:
    """Return whether two runs ended with bitwise equal weights."""

    def digests(trace: Trace) -> list[dict[str, str]]:
        return [{name: v.digest for name, v in variables.items()} for variables in trace.variables("final").values()]

    return digests(one) == digests(other)
