"""Compare two runs on one device that should be equal."""

from __future__ import annotations

from emulate.probe.trace import Trace
from emulate.verify.compared_runs import complete
from emulate.verify.ledgers import ledgers
from emulate.verify.order import objective_off, update_off

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


def starts_alike(reference: Trace, topology: Trace) -> bool:
    """Return whether each replica of a topology starts with the reference's weights."""
    first, *_ = [*initial(reference), {}]
    return bool(first) and all(weights == first for weights in initial(topology))
