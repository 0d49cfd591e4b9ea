"""Compare runs that were repeated: equally on one device, and with one suspect switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulate.trace import Trace
from emulate.verify.arithmetic import explain
from emulate.verify.compare import Comparison, compare
from emulate.verify.compared_runs import complete
from emulate.verify.ledgers import gradient_off, ledgers, objective_off, update_off

_ROUNDED = 1e-3
"""So far, relative to an update or a loss, two runs may be apart by rounding."""


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


def does_the_same(one: Trace, other: Trace) -> bool:
    """Return whether two runs on one device train alike, up to what another order of operations rounds."""
    if differing(one, other) is not None or len(one.optimizers) != len(other.optimizers):
        return False
    pairs = [(name, complete(one, name), complete(other, name)) for name in one.optimizers]
    return all(len(ours) == len(theirs) for _, ours, theirs in pairs) and not any(
        max(objective_off(a, b), update_off((one, other), name, k)) > _ROUNDED
        for name, ours, theirs in pairs
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True))
    )


def computes_the_same(one: Trace, other: Trace) -> bool:
    """Return whether losses and gradients of two runs are apart by no more than rounding; weights may be by steps of it."""
    pairs = [pair for name in one.optimizers for pair in zip(complete(one, name), complete(other, name), strict=False)]
    return all(max(objective_off(a, b), gradient_off(a, b)) <= _ROUNDED for a, b in pairs)


def starts_alike(reference: Trace, topology: Trace) -> bool:
    """Return whether each replica of a topology starts with the reference's weights."""
    first, *_ = [*initial(reference), {}]
    return bool(first) and all(weights == first for weights in initial(topology))


@dataclass(frozen=True)
class Rerun:
    """Hold runs repeated with one suspect switched off; `confirm` makes noise runs with a larger perturbation.

    Attributes:
        source: The run on one device with its own gradients, where `reference` applies the topology's.
        reported: Makes runs of the program itself, for what it reports between its steps.
    """

    reference: Trace
    topology: Trace
    noise: Sequence[Trace] = ()
    confirm: Callable[[], Sequence[Trace]] = tuple
    source: Trace | None = None
    reported: Callable[[], Sequence[Trace]] = tuple

    def compare(self) -> Comparison:
        """Compare both sides. Look again at gradients that may cancel over the batch, and at late reports."""
        kinks = self.reference.follows
        of_steps = compare_confirmed(self.reference, self.topology, self.noise, self.confirm, self.source, kinks=kinks)
        return with_runs_of_the_program(of_steps, self.reported)


def compare_confirmed(
    reference: Trace,
    topology: Trace,
    noise: Sequence[Trace],
    confirm: Callable[[], Sequence[Trace]],
    source: Trace | None,
    *,
    kinks: bool,
    is_known: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Compare, with as few noise runs as say enough, and with a larger perturbation where kinks or what cancels may be all."""
    first = compare(reference, topology, noise[:1], source=source)
    if first.is_equivalent or is_known():
        return first
    if kinks and reference.follows and _may_be_kinks(first):
        for confirmation in (confirm()[:1], confirm()):  # one often shows all
            comparison = compare(reference, topology, noise[:1], confirmation=confirmation, source=source)
            if comparison.is_equivalent or _is_explained_from_the_first(comparison):
                return comparison
    first = compare(reference, topology, noise, source=source) if len(noise) > len(noise[:1]) else first
    if not (first.cancels or (kinks and _may_be_kinks(first))):
        return first
    more = confirm()
    return compare(reference, topology, noise, confirmation=more, source=source) if more else first


def with_runs_of_the_program(comparison: Comparison, of_program: Callable[[], Sequence[Trace]]) -> Comparison:
    """Compare again with runs of the program itself, where reports alone differ, late ones too. One often says enough."""
    for first in (slice(1), slice(None)):
        if comparison.differs_in_late_reports and (reported := of_program()[first]):  # one that failed tells nothing
            runs = comparison.runs
            comparison = compare(
                runs.reference, runs.topology, runs.noise, confirmation=runs.confirmation, source=runs.source, reported=reported
            )
    return comparison


def _may_be_kinks(comparison: Comparison) -> bool:
    """Return whether units on the other side of a kink may be what differs first.

    What a model explains exactly is no accident of rounding; it may still begin after a step that is.
    """
    return comparison.needs_confirmation and not _is_explained_from_the_first(comparison)


def _is_explained_from_the_first(comparison: Comparison) -> bool:
    """Return whether a model of the gradients explains the first step that differs."""
    return comparison.first is not None and any(fit.step == comparison.first.step for fit in explain(comparison).fits)
