"""Compare runs: those that should be equal by themselves, others with as few noise runs as say enough.

The noise runs were recorded before, or a lab makes them as they are asked for.

More of them only make the noise floor wider. So what agrees beside the first agrees beside all, and the others are asked for
only where something differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulate.trace import Trace
from emulate.verify.arithmetic import explain
from emulate.verify.compare import Comparison, compare
from emulate.verify.compared_runs import complete
from emulate.verify.joins import Joins
from emulate.verify.ledgers import gradient_off, ledgers, objective_off, updates_off
from emulate.verify.result import RunResult
from emulate.verify.run_spec import AS_IT_STANDS, Variation

_ROUNDED = 1e-3
"""So far, relative to an update or a loss, two runs may be apart by rounding."""
_TIMES = 3.0
"""So many times as far off as what a model leaves is a difference that the model explains."""
NOISE_RUNS = 3
CONFIRMING_RUNS = 4
ORDER_RUNS = 2


@dataclass(frozen=True)
class RunPair:
    """Hold two traces to compare, and what a lab must know to make more runs for them.

    Attributes:
        reference: The run on one device.
        topology: The run to judge.
        variation: That of the reference.
        noise_of: The variation whose noise runs give the floor; None where what differs needs no noise.
        source: The run on one device with its own gradients, where `reference` applies the topology's.
        run: How the topology's run went; None of recorded traces.
    """

    reference: Trace
    topology: Trace
    variation: Variation = AS_IT_STANDS
    noise_of: Variation | None = AS_IT_STANDS
    source: Trace | None = None
    run: RunResult | None = None


class Recorded:
    """Answer from traces that are there: nothing can be run again, as where two recorded traces are compared.

    `Lab` makes runs instead. What to ask for, as few runs as say enough, is the same in both.

    Args:
        noise: The noise runs of the reference.

    Attributes:
        permutes: Whether noise runs have the rows of each batch in another order; not where that is another training.
    """

    def __init__(self, noise: Sequence[Trace] = ()) -> None:
        self._recorded = noise
        self.permutes = True

    def has_noise(self, pair: RunPair) -> bool:
        """Return whether rounding is measured for two traces."""
        return pair.noise_of is not None and bool(self._recorded)

    def has_dear_noise(self, pair: RunPair) -> bool:
        """Return whether a noise run is a start of the program."""
        return False

    def measure_noise(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        """Return the first noise runs, without those that failed."""
        return self._recorded[:number] if pair.noise_of is not None else ()

    def confirm(self, pair: RunPair, number: int = CONFIRMING_RUNS) -> Sequence[Trace]:
        """Return noise runs with a larger perturbation: a small difference may come from a kink or a gradient that cancels."""
        return ()

    def run_program(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        """Return runs of the program itself on one device, for what it reports between its steps."""
        return ()

    def compare_switched(self, pair: RunPair, asked: Sequence[str]) -> Comparison | None:
        """Compare both sides with suspects switched off, or the reference on other rows; None where that cannot be run."""
        return None

    def find_joins(
        self, pair: RunPair, asked: Sequence[str], optimizer: str, step: int, *, may_start: bool = True
    ) -> Joins | None:
        """Return what must see the whole batch in a step; None where that cannot be tried."""
        return None

    def repeat(self) -> RunResult | None:
        """Return how the unchanged reference went once more."""
        return None

    def vary_hosts(self, pair: RunPair, what: str) -> RunResult | None:
        """Return the topology's run with hosts that differ in `seeds`, `hashes` or `listing`; None where it shows nothing."""
        return None

    def places_of(self, what: str) -> Sequence[str]:
        """Return where the program's own files depend on `hashes` or on the `listing` of folders."""
        return ()

    def compare_enough(self, pair: RunPair) -> Comparison:
        """Compare with the first noise run, and with all of them only where that leaves a difference."""
        noise = self.measure_noise(pair, 1)
        first = compare(pair.reference, pair.topology, noise)
        if first.is_equivalent or len(every := self.measure_noise(pair)) == len(noise):
            return first
        return compare(pair.reference, pair.topology, every)

    def compare(
        self, pair: RunPair, *, kinks: bool, is_known: Callable[[Comparison], bool] = lambda first: False
    ) -> Comparison:
        """Compare with as few runs as say enough.

        Args:
            pair: What to compare.
            kinks: Whether units on the other side of a kink may be what differs.
            is_known: Asked with the first comparison, where that differs: whether it needs no further look.

        Returns:
            The comparison, with runs of the program itself where only they show what it reports.
        """
        comparison = self._compare_steps(pair, kinks, is_known)
        for number in (1, NOISE_RUNS):  # one often says enough
            if comparison.differs_in_late_reports and (reported := self.run_program(pair, number)):
                runs = comparison.runs  # one that failed tells nothing
                comparison = compare(
                    *(runs.reference, runs.topology, runs.noise),
                    confirmation=runs.confirmation,
                    source=runs.source,
                    reported=reported,
                )
        return comparison

    def _compare_steps(self, pair: RunPair, kinks: bool, is_known: Callable[[Comparison], bool]) -> Comparison:
        noise = self.measure_noise(pair, 1)

        def beside(noise: Sequence[Trace], confirmation: Sequence[Trace] = ()) -> Comparison:
            return compare(pair.reference, pair.topology, noise, confirmation=confirmation, source=pair.source)

        first = beside(noise)
        if first.is_equivalent or is_known(first) or (first.is_clear and self.has_dear_noise(pair)):
            return first
        if kinks and pair.reference.follows and _may_be_kinks(first):
            for number in (1, CONFIRMING_RUNS):  # one often shows all
                comparison = beside(noise, self.confirm(pair, number))
                if comparison.is_equivalent or _is_explained_from_the_first(comparison):
                    return comparison
        if len(every := self.measure_noise(pair)) > len(noise):
            first = beside(every)
        if first.cancels or (kinks and _may_be_kinks(first)):
            for number in (1, CONFIRMING_RUNS):
                if confirmation := self.confirm(pair, number):
                    first = beside(every, confirmation)
                if first.is_equivalent or (first.is_clear and self.has_dear_noise(pair)):
                    break
        return first


def _may_be_kinks(comparison: Comparison) -> bool:
    """Return whether units on the other side of a kink may be what differs first.

    What a model explains exactly is no accident of rounding; it may still begin after a step that is.
    """
    return comparison.needs_confirmation and not _is_explained_from_the_first(comparison)


def _is_explained_from_the_first(comparison: Comparison) -> bool:
    """Return whether a model of the gradients explains the first step that differs, and not just a part of the difference."""
    if (first := comparison.first) is None:
        return False
    most = max((point.ratio for point in comparison.exceeding if point.step == first.step), default=math.inf)
    return any(fit.step == first.step and _TIMES * fit.after <= most for fit in explain(comparison).fits)


def differing(one: Trace, other: Trace) -> str | None:
    """Return the first difference between two runs that should be equal, in the order of computation."""
    if initial(one) != initial(other):
        return "the initial weights"
    pairs = ledgers(one, other).values()
    apart = [ledger for ledger in pairs if ledger.is_known and ledger.first_apart is not None]
    if apart:
        same = apart[0].is_reordered
        return f"the {'order' if same else 'choice or contents'} of the examples (from step {apart[0].first_apart} on)"
    step = _first_draw(one, other)
    return None if step is None else f"the random numbers drawn in step {step}"


def initial(trace: Trace) -> list[dict[str, str]]:
    """Return the bits of each replica's initial weights."""
    return [{name: v.digest for name, v in variables.items()} for _, variables in sorted(trace.variables("initial").items())]


def _first_draw(one: Trace, other: Trace) -> int | None:
    for name in one.optimizers:
        for k, (a, b) in enumerate(zip(complete(one, name), complete(other, name), strict=False)):
            if [step.draws for step in a.values()] != [step.draws for step in b.values()]:
                return k
    return None


def trains_on_the_same(reference: Trace, topology: Trace) -> bool:
    """Return whether a topology's replicas together train on the reference's examples, step by step."""
    known = [ledger for ledger in ledgers(reference, topology).values() if ledger.is_known]
    return bool(known) and all(ledger.is_same for ledger in known)


def draws_the_same(reference: Trace, topology: Trace) -> bool:
    """Return whether the first replica of a topology draws in each step what the reference draws, as far as draws are kept."""
    steps = [zip(complete(reference, name), complete(topology, name), strict=False) for name in reference.optimizers]
    return all(ours[min(ours)].draws == theirs[min(theirs)].draws for pairs in steps for theirs, ours in pairs)


def trained_otherwise(one: Trace, other: Trace) -> str | None:
    """Return what makes two runs on one device train otherwise; None up to what another order of operations rounds.

    Of a run that was stopped after its steps, what the other one does later is not compared.
    """
    if (first := differing(one, other)) is not None:
        return first
    if len(one.optimizers) != len(other.optimizers):
        return "the optimizers"
    pairs = [(name, complete(one, name), complete(other, name)) for name in one.optimizers]
    is_stopped = [any(event["reason"] == "steps" for _, event in trace.of("end")) for trace in (one, other)]
    apart = [len(ours) - len(theirs) for _, ours, theirs in pairs]
    if not all(number == 0 or is_stopped[number > 0] for number in apart):
        return "the number of steps"
    is_off = any(
        updates_off(one, other, name) > _ROUNDED
        or any(objective_off(a, b) > _ROUNDED for a, b in zip(ours, theirs, strict=False))
        for name, ours, theirs in pairs
    )
    return "the losses or the updates" if is_off else None


def computes_the_same(one: Trace, other: Trace) -> bool:
    """Return whether losses and gradients of two runs are apart by no more than rounding; weights may be by steps of it."""
    pairs = [pair for name in one.optimizers for pair in zip(complete(one, name), complete(other, name), strict=False)]
    return all(max(objective_off(a, b), gradient_off(a, b)) <= _ROUNDED for a, b in pairs)


def starts_alike(reference: Trace, topology: Trace) -> bool:
    """Return whether each replica of a topology starts with the reference's weights."""
    first, *_ = [*initial(reference), {}]
    return bool(first) and all(weights == first for weights in initial(topology))


def same_weights(one: Trace, other: Trace) -> bool:
    """Return whether two runs ended with bitwise equal weights."""

    def digests(trace: Trace) -> list[dict[str, str]]:
        return [{name: v.digest for name, v in variables.items()} for variables in trace.variables("final").values()]

    return digests(one) == digests(other)
