"""Choose the reference that suits a run: at its weights, on its examples, in lockstep, or on the shares of a larger batch.

Where the batch grows with the replicas, one device gets the examples of all.

In lockstep each step is compared at the weights that the judged run had. The reference makes its steps again, evaluated or by
another run of the program, and its optimizers apply what this run's have applied. Its weights stay this run's then but for the
rounding of one update, so that each step is compared by itself: its gradients at the same weights, and what the optimizer makes
of the same gradients. What agrees so in every step trains the same model, however far apart the runs have drifted by rounding;
and a mistake of a late step, which would drown in what the steps before have amplified, stands out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import replace
from functools import cache

from emulate.evaluate import counts_the_batch, refusal
from emulate.interventions import by_share
from emulate.recorder import Follow, Replay
from emulate.told import Told, told
from emulate.topology import Topology
from emulate.trace import Facts, Trace
from emulate.verify.arithmetic import ROUND, explain
from emulate.verify.compare import compare
from emulate.verify.compared_runs import aggregation, complete, stated_aggregation
from emulate.verify.gradients import aligned, norm, weight_of
from emulate.verify.judge import Judgement
from emulate.verify.lab import Lab
from emulate.verify.ledgers import has_ended, is_wide, ledgers
from emulate.verify.lines import ProgramLines
from emulate.verify.noise import FACTOR
from emulate.verify.recorded import RunPair, starts_alike
from emulate.verify.result import RunResult, trace_of
from emulate.verify.run_spec import AS_IT_STANDS, Variation, rows_of_replicas

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
    applied = [name for name in both if stated_aggregation(topology, name) != "tape"]
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
    if follows is None or refusal(reference) is not None or not can_lead(topology, reference):
        return None
    compared = ledgers(plain, topology).values()
    if any(ledger.growth > 1 for ledger in compared) or Facts.of(plain, topology).asynchronous:
        return None  # other steps than those of one device
    is_same = bool(compared) and all(ledger.is_same for ledger in compared if ledger.is_known)
    return follows, None if is_same else Replay(topology.directory)


def can_lead(trace: Trace, reference: Trace) -> bool:
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


def shares_of_batchnorm(reference: Trace, topology: Topology) -> Variation | None:
    """Return the reference that normalizes as replicas do which share each batch evenly.

    Args:
        reference: The program as it stands.
        topology: Where it runs.

    Returns:
        The variation; None without BatchNormalization, and where the program asks for the number of replicas: its batch may
        grow then.
    """
    facts, rows = Facts.of(reference), sum(rows_of_replicas(reference)[0])
    replicas = topology.num_replicas
    is_open = facts.bfloat16 or facts.float16 or ProgramLines(reference).made("num_replicas")
    if not facts.batchnorm or replicas < 2 or not rows or rows % replicas or is_open:
        return None
    return AS_IT_STANDS.without(by_share([rows // replicas] * replicas))


def led_by_share(lab: Lab, led: Variation, reference: Trace, topology: Trace) -> Variation | None:
    """Return the reference that normalizes as replicas do, where that alone explains the first step's statistics.

    Args:
        lab: Evaluates it.
        led: What makes the reference's steps at the topology's weights.
        reference: The program on one device as it normalizes there.
        topology: The topology's run.

    Returns:
        The variation; None where BatchNormalization makes no difference, or another one.
    """
    names, splits = Facts.of(reference, topology).batchnorm, rows_of_replicas(topology)
    if not names or len(splits[0]) < 2 or not all(splits[0]) or led.replay is not None:
        return None
    variation = led.without(by_share(*splits))
    by_shares = trace_of(lab.run_reference(variation)) if lab.evaluate(variation) else None
    if by_shares is None:
        return None
    apart, left = (_statistics_apart(trace, topology, names) for trace in (reference, by_shares))
    return variation if apart > FACTOR * left else None


def _statistics_apart(reference: Trace, topology: Trace, names: Collection[str]) -> float:
    """Return by how much most statistics of BatchNormalization differ after the first step, in parts of themselves.

    Some are means that cancel, and rounding alone.
    """
    off = [0.0]
    for optimizer in reference.optimizers:
        pair = [complete(trace, optimizer)[:1] for trace in (reference, topology)]
        for name in names if all(pair) else ():
            stored = [weight_of(steps[0], name) for steps in pair]
            if None not in stored:
                expected, other = aligned([array for array in stored if array is not None])
                off.append(norm(expected - other) / (norm(expected) or 1.0))
    return statistics.median(off)


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


def explaining_a_larger_batch(lab: Lab, run: RunResult, base: Variation, topology: Trace, growth: int) -> list[Variation]:
    """Return which explains the run better: the union of the replicas' examples, or one share after the other.

    One share after the other has all that a replica does with its own rows alone. Where that does not matter and the shares
    explain the run, nothing else need be tried. Where it matters, the union comes first, so that it is looked for what the
    shares would hide: with the number of replicas in what makes the batch, and not in what makes up for adding them up.

    Args:
        lab: Makes the reference in both ways.
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
        """Return how badly a reference explains the run: its largest error in units of the noise."""
        pair = lab.pair(way, topology)
        # Rows of the union in another order may be another training: one device cuts the batch otherwise than replicas do.
        is_worse = way != shares and _is_wide(lab, pair) and not _is_wide(lab, lab.pair(shares, topology))
        worst = None if is_worse or pair is None else lab.compare_enough(pair).worst
        return math.inf if worst is None else worst.error / max(worst.noise, 1e-300)

    if misfit(shares) <= FACTOR and not grouping_matters(lab, shares, topology):
        run.notes.append(_SAME_EXAMPLES.format(growth=growth))
        return [shares]
    if misfit(union) == misfit(shares) == math.inf:
        run.notes.append(_NOT_THE_SAME.format(growth=growth))
        return [base]
    run.notes.append(_SAME_EXAMPLES.format(growth=growth))
    is_larger = misfit(union) <= misfit(shares) and _is_larger(lab, lab.pair(shares, topology), growth)
    if is_larger and not grouping_matters(lab, shares, topology):
        run.notes.append(told("fixed-divisor")("The loss is divided by a number that does not grow with the batch."))
        return [shares]
    if misfit(union) <= FACTOR:
        return [min((union, shares), key=misfit)]
    number = len(topology.replicas)
    workers = 1 if topology.topology.num_ps else topology.topology.num_hosts
    whole = replace(base, replay=Replay(topology.directory, batch_of=number, workers=workers))
    if lab.pair(whole, topology) is None:  # a program that cannot compute with such a number
        whole = replace(base, replay=Replay(topology.directory, told=number, workers=workers))
    if misfit(whole) <= FACTOR:
        return [whole]
    for way in (union, shares):
        is_sound = way == union or not grouping_matters(lab, shares, topology)
        if _differs_in_updates_alone(lab, lab.pair(way, topology)) and is_sound:
            return [way]
    ways = [way for way in (whole, union) if misfit(way) < math.inf]
    source = trace_of(lab.run_reference(base.source))
    if not ways and source is not None and counts_the_batch(source):
        summed = replace(base, replay=replace(in_shares, summed=True))
        if misfit(summed) <= FACTOR:
            return [summed]
    if not ways and grouping_matters(lab, shares, topology):
        run.notes[-1] = _NOT_THE_SAME.format(growth=growth)  # shares alone would hide what a replica does with its own rows
        return [base]
    return [*sorted(ways, key=lambda way: _objective_off(lab.pair(way, topology)))[:1], shares]


def grouping_matters(lab: Lab, shares: Variation, topology: Trace) -> bool:
    """Return whether the gradients of one share after the other depend on which examples are in one share.

    Args:
        lab: Makes the reference with other shares.
        shares: The reference with one share after the other.
        topology: The topology's run, whose shares they are.

    Returns:
        Whether they do, by more than rounding.
    """
    assert shares.replay is not None
    pair = lab.pair(shares, topology)
    dealt = trace_of(lab.run_reference(replace(shares, replay=replace(shares.replay, regrouped=True))))
    if pair is None or dealt is None:
        return False
    return lab.compare_enough(replace(pair, topology=dealt)).first_step("gradient", "weight") is not None


def _is_wide(lab: Lab, pair: RunPair | None) -> bool:
    """Return whether the noise of a reference may hide what the program does."""
    return pair is not None and is_wide(pair.reference, lab.measure_noise(pair, 1))


def _differs_in_updates_alone(lab: Lab, pair: RunPair | None) -> bool:
    """Return whether a reference has the gradients of a run, and only makes other weights from them."""
    if pair is None:
        return False
    comparison = lab.compare_enough(pair)
    first, apart = comparison.first_step("gradient", "initial-weight", "variable"), comparison.first_step("weight")
    return apart is not None and (first is None or first > apart)


def _objective_off(pair: RunPair | None) -> float:
    """Return the relative error of the first sum of local objectives, which clipping does not hide."""
    objectives = () if pair is None else compare(pair.reference, pair.topology).objectives
    first = next(iter(objectives), None)
    if first is None or not first.measure.reference_value:
        return math.inf
    return first.measure.error / abs(first.measure.reference_value)


def _is_larger(lab: Lab, pair: RunPair | None, growth: int) -> bool:
    """Return whether every gradient is larger by the growth of the batch: examples are summed, not averaged."""
    fits = () if pair is None else explain(lab.compare_enough(pair)).scaled
    return bool(fits) and all(abs(fit.scale / growth - 1) < ROUND for fit in fits)
