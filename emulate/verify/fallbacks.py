"""Judge a run that the plain reference does not suit: its batch grows, rounding drives it apart, or one device fails.

Where the batch grows with the replicas, one device gets the examples of all. Where the program raises or hangs on one device,
only how runs end can be told.

In lockstep each step is compared at the weights that the judged run had. The reference makes its steps again, evaluated or by
another run of the program, and its optimizers apply what this run's have applied. Its weights stay this run's then but for the
rounding of one update, so that each step is compared by itself: its gradients at the same weights, and what the optimizer makes
of the same gradients. What agrees so in every step trains the same model, however far apart the runs have drifted by rounding;
and a mistake of a late step, which would drown in what the steps before have amplified, stands out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

from emulate.evaluate import counts_the_batch, refusal
from emulate.recorder import Follow, Replay
from emulate.told import Told, told
from emulate.trace import Facts, Trace
from emulate.verify.arithmetic import ROUND, explain
from emulate.verify.case import Case
from emulate.verify.causes.cause import error_line
from emulate.verify.compare import compare, compare_enough
from emulate.verify.compared_runs import aggregation
from emulate.verify.judge import Judgement, judge
from emulate.verify.ledgers import has_ended, is_wide, ledgers
from emulate.verify.noise import FACTOR
from emulate.verify.repeats import starts_alike
from emulate.verify.result import Met, RunResult
from emulate.verify.run_summary import outcome_of, unjudged
from emulate.verify.runner import Runner
from emulate.verify.verdict import OF_REFERENCE, Reference, Run
from emulate.verify.yardstick import Variation, Yardstick, Yardsticks, trace_of

_AGREES_IN_LOCKSTEP = told("agrees-in-lockstep")(
    "rounding errors are amplified, and the weights drift apart{first}. gpudist ran the program on one device again and "
    "applied the gradients of this run. Step by step, at the same weights, gradients and updates agree"
)
_DIFFERS_IN_LOCKSTEP = told("compared-in-lockstep")(
    "rounding errors are amplified: gpudist compared each step at the same weights, on one device that "
    "applies the gradients of this run"
)


def follow(reference: Trace, topology: Trace) -> Follow | None:
    """Return what makes a reference follow a run; None if no optimizer applies gradients, or servers do it."""
    both = [name for name in topology.optimizers if name in reference.optimizers]
    applied = [name for name in both if not _is_of_tape(topology, name)]
    if not applied or topology.topology.num_ps:
        return None
    return Follow(topology.directory, tuple(name for name in applied if aggregation(topology, reference, name) == "mean"))


def lead(reference: Trace, topology: Trace, plain: Trace) -> tuple[Follow, Replay | None] | None:
    """Return what gives the steps of a reference the weights and the examples of a run.

    Args:
        reference: In the variation that is compared; its steps are evaluated.
        topology: The run.
        plain: The unchanged reference, whose examples are those of the program.

    Returns:
        Whose gradients are applied and, where they differ, whose examples are taken; None where that cannot be evaluated.
    """
    follows = follow(reference, topology)
    if follows is None or refusal(reference) is not None or not _can_lead(topology, reference):
        return None
    compared = ledgers(plain, topology).values()
    if any(ledger.growth > 1 for ledger in compared) or Facts.of(plain, topology).asynchronous:
        return None  # other steps than those of one device
    is_same = bool(compared) and all(ledger.is_same for ledger in compared if ledger.is_known)
    return follows, None if is_same else Replay(topology.directory)


def _can_lead(trace: Trace, reference: Trace) -> bool:
    """Return whether all of each gradient or of its sum was kept, and of first weights that are not those of a reference."""
    first = (v.array for variables in trace.variables("initial").values() for v in variables.values() if v.array is not None)
    if not (starts_alike(reference, trace) or all(array.is_complete for array in first)):
        return False
    steps = (step for name in trace.optimizers for step in trace.steps(name))
    return all(
        name in summed or array.is_complete
        for step in steps
        for summed in [{name for local in step.values() for name in local.sums}]
        for local in step.values()
        for name, array in local.gradients.items()
    )


def _is_of_tape(trace: Trace, optimizer: str) -> bool:
    return any(event.get("tape") for _, event in trace.of("step") if event["optimizer"] == optimizer)


def needs_lockstep(judgement: Judgement) -> bool:
    """Return whether a second look may tell more: a cause is unknown, or amplified rounding hides gradients."""
    return judgement.is_unexplained or (judgement.is_well and judgement.is_amplified)


def better_judgement(judgement: Judgement, followed: Judgement) -> Judgement:
    """Return the judgement that tells more.

    Single units on the other side of a kink stand out here too: what has no known cause then is left to the runs as they came.
    """
    if followed.is_well:
        first = judgement.first_divergence
        since = f" (in {first.tensor} from step {first.step} on)" if first is not None else ""
        return replace(followed, notes=(*followed.notes, _AGREES_IN_LOCKSTEP.format(first=since)))
    if followed.verdict == "divergent" and not followed.has_unexplained:
        return replace(followed, notes=(*followed.notes, _DIFFERS_IN_LOCKSTEP))
    return judgement


_SAME_EXAMPLES = told("larger-batch")(
    "The batch is {growth}x that of one device. gpudist gave one device the same examples in each step."
)
_NOT_THE_SAME = told("larger-batch-not-replayed")(
    "The batch is {growth}x that of one device, and gpudist could not give one device the same examples."
)


def note_of_more_examples(reference: Trace, topology: Trace) -> Told | None:
    """Return the text for a larger batch that does not make fewer steps: the program took more examples until its end.

    Args:
        reference: The program's run on one device.
        topology: Its run there.

    Returns:
        A note, or None.
    """
    if not (has_ended(reference) and has_ended(topology)):
        return None
    for name, ledger in ledgers(reference, topology).items():
        (ours, theirs), growth = ledger.rows_in_all, ledger.growth
        if growth > 1 and 2 * ours > (growth + 1) * theirs:
            return told("more-examples")(
                f"To its end it trains on {ours} examples in {len(topology.steps(name))} steps, one device on {theirs} in "
                f"{len(reference.steps(name))}: for the same epochs a batch {growth}x as large needs {growth}x fewer "
                "steps (steps_per_epoch = examples // batch)."
            )
    return None


def explaining_a_larger_batch(
    yardsticks: Yardsticks, run: RunResult, base: Variation, topology: Trace, growth: int
) -> list[Variation]:
    """Return which explains the run better: the union of the replicas' examples, or one share after the other.

    One share after the other has all that a replica does with its own rows alone. Where that does not matter and the shares
    explain the run, nothing else need be tried. Where it matters, the union comes first, so that it is looked for what the
    shares would hide: with the number of replicas in what makes the batch, and not in what makes up for adding them up.

    Args:
        yardsticks: Makes the reference in both ways.
        run: How the topology's run went; it is told what was done.
        base: The variation that is compared.
        topology: The topology's run in it.
        growth: How many times the batch of one device its batch is.

    Returns:
        What to judge on; a second one where the first may leave something unexplained.
    """
    union = replace(base, replay=Replay(topology.directory))
    in_shares = Replay(topology.directory, growth, taped="tape" in topology.optimizers)
    shares = replace(base, replay=in_shares)

    @cache
    def misfit(way: Variation) -> float:
        yardstick = yardsticks.with_noise(way)
        # Rows of the union in another order may be another training: one device cuts the batch otherwise than replicas do.
        is_worse = way != shares and _is_wide_in_noise(yardstick) and not _is_wide_in_noise(yardsticks.with_noise(shares))
        return math.inf if is_worse else _misfit(yardstick, topology)

    if misfit(shares) <= FACTOR and not grouping_matters(yardsticks, shares):
        run.notes.append(_SAME_EXAMPLES.format(growth=growth))
        return [shares]
    if misfit(union) == misfit(shares) == math.inf:
        run.notes.append(_NOT_THE_SAME.format(growth=growth))
        return [base]
    run.notes.append(_SAME_EXAMPLES.format(growth=growth))
    is_larger = misfit(union) <= misfit(shares) and _is_larger(yardsticks.with_noise(shares), topology, growth)
    if is_larger and not grouping_matters(yardsticks, shares):
        run.notes.append(told("fixed-divisor")("The loss is divided by a number that does not grow with the batch."))
        return [shares]
    if misfit(union) <= FACTOR:
        return [min((union, shares), key=misfit)]
    number = len(topology.replicas)
    workers = 1 if topology.topology.num_ps else topology.topology.num_hosts
    whole = replace(base, replay=Replay(topology.directory, batch_of=number, workers=workers))
    if yardsticks.with_noise(whole).traces() is None:  # a program that cannot compute with such a number
        whole = replace(base, replay=Replay(topology.directory, told=number, workers=workers))
    if misfit(whole) <= FACTOR:
        return [whole]
    for way in (union, shares):
        is_sound = way == union or not grouping_matters(yardsticks, shares)
        if _differs_in_updates_alone(yardsticks.with_noise(way), topology) and is_sound:
            return [way]
    ways = [way for way in (whole, union) if misfit(way) < math.inf]
    source = trace_of(yardsticks.reference(base.source).reference)
    if not ways and source is not None and counts_the_batch(source):
        summed = replace(base, replay=replace(in_shares, summed=True))
        if misfit(summed) <= FACTOR:
            return [summed]
    if not ways and grouping_matters(yardsticks, shares):
        run.notes[-1] = _NOT_THE_SAME.format(growth=growth)  # shares alone would hide what a replica does with its own rows
        return [base]
    return [*sorted(ways, key=lambda way: _objective_off(yardsticks.with_noise(way), topology))[:1], shares]


def _is_wide_in_noise(yardstick: Yardstick) -> bool:
    """Return whether the noise of a reference may hide what the program does."""
    traces = yardstick.traces()
    return traces is not None and is_wide(traces[0], traces[1][:1])


def grouping_matters(yardsticks: Yardsticks, shares: Variation) -> bool:
    """Return whether the gradients of one share after the other depend on which examples are in one share.

    Args:
        yardsticks: Makes the reference with other shares.
        shares: The reference with one share after the other.

    Returns:
        Whether they do, by more than rounding.
    """
    assert shares.replay is not None
    traces = yardsticks.with_noise(shares).traces()
    dealt = yardsticks.reference(replace(shares, replay=replace(shares.replay, regrouped=True))).traces()
    if traces is None or dealt is None:
        return False
    return compare_enough(traces[0], dealt[0], traces[1]).first_step("gradient", "weight") is not None


def _misfit(yardstick: Yardstick, topology: Trace) -> float:
    """Return how badly a reference explains a run: its largest error in units of the noise."""
    traces = yardstick.traces()
    worst = compare_enough(traces[0], topology, traces[1]).worst if traces is not None else None
    if worst is None:
        return math.inf
    return worst.error / max(worst.noise, 1e-300)


def _differs_in_updates_alone(yardstick: Yardstick, topology: Trace) -> bool:
    """Return whether a reference has the gradients of a run, and only makes other weights from them."""
    traces = yardstick.traces()
    comparison = compare_enough(traces[0], topology, traces[1]) if traces is not None else None
    if comparison is None:
        return False
    first, apart = comparison.first_step("gradient", "initial-weight", "variable"), comparison.first_step("weight")
    return apart is not None and (first is None or first > apart)


def _objective_off(yardstick: Yardstick, topology: Trace) -> float:
    """Return the relative error of the first sum of local objectives, which clipping does not hide."""
    traces = yardstick.traces()
    first = next(iter(compare(traces[0], topology).objectives), None) if traces is not None else None
    if first is None or not first.measure.reference_value:
        return math.inf
    return first.measure.error / abs(first.measure.reference_value)


def _is_larger(yardstick: Yardstick, topology: Trace, growth: int) -> bool:
    """Return whether every gradient is larger by the growth of the batch: examples are summed, not averaged."""
    traces = yardstick.traces()
    fits = explain(compare_enough(traces[0], topology, traces[1])).scaled if traces is not None else ()
    return bool(fits) and all(abs(fit.scale / growth - 1) < ROUND for fit in fits)


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
    runner: Runner, allow: Collection[str], reference: RunResult, runs: Sequence[RunResult]
) -> tuple[list[Run], list[Told]]:
    """Judge the ends of runs whose reference did not end well.

    Args:
        runner: Has made them.
        allow: Codes of causes that do not decide.
        reference: The run on one device.
        runs: Those of the topologies.

    Returns:
        The judged runs, and what may have made the reference fail.
    """
    judged = [_judge_end(run, reference, runner, allow) for run in runs]
    is_mixed = runner.sets_tf_config and not all(run.topology.has_several_hosts for run in runs)
    notes = _without_us(runner, reference)
    if _OF_PRECISION in notes:  # the option makes it fail, and tells nothing of the program
        judged = [replace(run, verdict="unverified") if _fails_by_type(run) else run for run in judged]
    return judged, notes + [_WITH_TF_CONFIG] * is_mixed + _out_of_time(reference)


def _judge_end(run: RunResult, reference: RunResult, runner: Runner, allow: Collection[str]) -> Run:
    """Return the run if the reference failed or hung: only the end of the topology's run is known."""
    ends = "raises" if reference.status == "failed" else "does not end"
    is_well = run.status == "ok"
    if is_well:
        where = Reference(reference.status, topology=str(reference.topology)).where
        run.notes.append(told("nothing-to-compare-with")(f"On {where} the program {ends}; there is nothing to compare with."))
        run.status, run.reason = reference.status, reference.reason
        run.failure, run.stacks = reference.failure, reference.stacks
    nothing = runner.empty_trace(reference)
    met = Met.together((run.met, reference.met))
    case = Case(nothing, run.trace or nothing, outcome=outcome_of(run, reference), met=met)
    judged = judge(case, allow).fill(unjudged(run, reference))
    return replace(judged, reason=OF_REFERENCE, failure=None) if is_well else judged


def _without_us(runner: Runner, reference: RunResult) -> list[Told]:
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
        text = f"Without gpudist, on this machine as it is{with_it}, the program {how}: {what} makes it fail."
        return [told("fails-by-emulation")(text)]
    ours, theirs = (error_line(run.failure, "an error").rstrip(".") for run in (reference, plain))
    if ours.startswith("EOFError"):
        return []  # it had no standard input there either
    is_same = re.sub(_COUNTED, "", ours) == re.sub(_COUNTED, "", theirs)
    error = "the same error as on one device" if is_same else f"another error: {theirs}"
    where = ", with the TF_CONFIG of one worker," if runner.sets_tf_config else ""
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
