"""Judge runs of a program that raises or hangs on one device: only how they end can be told."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from emulate.verify.case import Case
from emulate.verify.causes.cause import error_line
from emulate.verify.judge import judge
from emulate.verify.meetings import Met
from emulate.verify.result import RunResult
from emulate.verify.run_summary import outcome_of, unjudged
from emulate.verify.runner import Runner
from emulate.verify.verdict import OF_REFERENCE, Reference, Run

_COUNTED = r"(?<=_)\d+\b|\b0x[0-9a-f]+\b"
"""Parts of an error that differ in each process: counters in TensorFlow's names, and memory addresses."""
_OF_PRECISION = (
    "--precision makes the program fail; without gpudist it runs. It mixes arrays, variables or casts of one "
    "float type with those that Keras makes in another. Remove the option, or use the type of "
    "keras.config.floatx()."
)
_WITH_TF_CONFIG = (
    "The run on one device had a TF_CONFIG with one worker, because topologies with several hosts need it. "
    "Topologies with one host have none. Verify them in a separate call, in which the run on one device has "
    "none either."
)


def judge_ends(
    runner: Runner, allow: Collection[str], reference: RunResult, runs: Sequence[RunResult]
) -> tuple[list[Run], list[str]]:
    """Judge the ends of runs whose reference did not end well.

    Args:
        runner: Has made them.
        allow: Codes of causes that do not decide.
        reference: The run on one device.
        runs: Those of the topologies.

    Returns:
        The judged runs, and what may have made the reference fail.
    """
    judged = [_judge(run, reference, runner, allow) for run in runs]
    is_mixed = runner.sets_tf_config and not all(run.topology.has_several_hosts for run in runs)
    notes = _without_us(runner, reference)
    if _OF_PRECISION in notes:  # the option makes it fail, and tells nothing of the program
        judged = [replace(run, verdict="unverified") if _fails_by_type(run) else run for run in judged]
    return judged, notes + [_WITH_TF_CONFIG] * is_mixed + _out_of_time(reference)


def _judge(run: RunResult, reference: RunResult, runner: Runner, allow: Collection[str]) -> Run:
    """Return the run if the reference failed or hung: only the end of the topology's run is known."""
    ends = "raises" if reference.status == "failed" else "does not end"
    is_well = run.status == "ok"
    if is_well:
        where = Reference(reference.status, topology=str(reference.topology)).where
        run.notes.append(f"On {where} the program {ends}; there is nothing to compare with.")
        run.status, run.reason = reference.status, reference.reason
        run.failure, run.stacks = reference.failure, reference.stacks
    nothing = runner.empty_trace(reference)
    met = Met.together((run.met, reference.met))
    case = Case(nothing, run.trace or nothing, outcome=outcome_of(run, reference), met=met)
    judged = judge(case, allow).fill(unjudged(run, reference))
    return replace(judged, reason=OF_REFERENCE, failure=None) if is_well else judged


def _without_us(runner: Runner, reference: RunResult) -> list[str]:
    """Check whether a program that raises on one device also fails without emulation and recording."""
    if reference.status != "failed" or reference.topology.num_ps:  # without TF_CONFIG it would fail by that
        return []
    plain = runner.start_plain(3 * reference.seconds).result()
    if plain.status != "failed":
        if runner.precision != "float32" and _names_a_type(reference.failure):
            return [_OF_PRECISION]
        how = "ends without an error" if plain.status == "ok" else "had not failed when it was ended"
        what = "what gpudist emulates" if runner.precision == "float32" else "--precision, or what it emulates,"
        with_it = ", with the TF_CONFIG of one worker" if runner.sets_tf_config else ""
        return [f"Without gpudist, on this machine as it is{with_it}, the program {how}: {what} makes it fail."]
    ours, theirs = (error_line(run.failure, "an error").rstrip(".") for run in (reference, plain))
    if ours.startswith("EOFError"):
        return []  # it had no standard input there either
    is_same = re.sub(_COUNTED, "", ours) == re.sub(_COUNTED, "", theirs)
    error = "the same error as on one device" if is_same else f"another error: {theirs}"
    where = ", with the TF_CONFIG of one worker," if runner.sets_tf_config else ""
    return [f"Without gpudist{where} the program fails too, with {error}."]


def _out_of_time(reference: RunResult) -> list[str]:
    """Return what may help a program that was not stuck when its time was over."""
    if reference.reason != "timeout":
        return []
    made = reference.trace.num_steps if reference.trace is not None else 0
    more = "Give fewer --steps, or a longer --timeout" if made else "TensorFlow needs seconds to start: give a longer --timeout"
    return [f"On one device the time was over before step {made + 1}. {more}."]


def _names_a_type(failure: str | None) -> bool:
    """Return whether an error is about 64-bit types beside others."""
    return re.search(r"\b(float64|double)\b", error_line(failure, "")) is not None


def _fails_by_type(run: Run) -> bool:
    """Return whether a run failed like a reference with a type error, or was to be compared with it."""
    return run.verdict == "failed" and (run.is_of_reference or _names_a_type(run.failure))
