"""Compare a batch that grows with the replicas: give one device the examples of all."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from emulate.probe import Replay, Trace, counts_the_batch
from emulate.verify.arithmetic import explain
from emulate.verify.compare import compare, compare_enough
from emulate.verify.fit import ROUND
from emulate.verify.ledgers import has_ended, ledgers
from emulate.verify.noise import FACTOR
from emulate.verify.order import is_wide
from emulate.verify.result import RunResult
from emulate.verify.yardstick import Variation, Yardstick, Yardsticks, trace_of

_SAME_EXAMPLES = "The batch is {growth}x that of one device. gpudist gave one device the same examples in each step."
_NOT_THE_SAME = "The batch is {growth}x that of one device, and gpudist could not give one device the same examples."


def longer(reference: Trace, topology: Trace) -> str | None:
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
            return (
                f"To its end it trains on {ours} examples in {len(topology.steps(name))} steps, one device on {theirs} in "
                f"{len(reference.steps(name))}: for the same epochs a batch {growth}x as large needs {growth}x fewer "
                "steps (steps_per_epoch = examples // batch)."
            )
    return None


def explaining(yardsticks: Yardsticks, run: RunResult, base: Variation, topology: Trace, growth: int) -> list[Variation]:
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
        is_worse = way != shares and _is_wide(yardstick) and not _is_wide(yardsticks.with_noise(shares))
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
        run.notes.append("The loss is divided by a number that does not grow with the batch.")
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


def _is_wide(yardstick: Yardstick) -> bool:
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
