"""Make the ledgers of two traces: which examples each step had, as far as the probe saw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from emulate.probe.examples import joined, row_names
from emulate.probe.trace import Step, Trace
from emulate.verify.arrays import Floats
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll
from emulate.verify.ledger import Ledger, Rows

_DISTINCT = 0.9
"""So many of a step's rows must differ in what is to tell them apart."""
_CLOSE = 1e-3
"""Largest relative difference between outputs of the same weights for the same rows."""


def ledgers(reference: Trace, topology: Trace) -> dict[str, Ledger]:
    """Return the ledger of each optimizer that both runs have. It ends at examples that a probe did not see."""
    names = [name for name in reference.optimizers if name in topology.optimizers]
    ended = has_ended(topology)
    made = {name: _ledger(name, complete(reference, name), complete(topology, name), ended) for name in names}
    whole = [name for name in names if has_ended(reference) and len(made[name].reference) == len(complete(reference, name))]
    return {name: replace(ledger, is_whole=name in whole) for name, ledger in made.items()}


def hosts_of_rows(trace: Trace, optimizer: str) -> dict[str, set[int]]:
    """Return each example that an optimizer's steps consumed, with the hosts that did."""
    hosts: dict[str, set[int]] = {}
    for step in complete(trace, optimizer):
        for local in step.values():
            for row in local.rows or ():
                hosts.setdefault(row, set()).add(local.host)
    return hosts


def parts_of_rows(trace: Trace, optimizer: str, *, after: int = -1) -> list[tuple[str, ...]]:
    """Return the inputs of each example that an optimizer's steps consumed, each by its identity.

    Args:
        trace: Of a run.
        optimizer: The optimizer.
        after: Only rows of hosts with a number larger than this.

    Returns:
        One a row, in the order of steps and replicas; of steps whose inputs were not kept none.
    """
    steps = [local for step in complete(trace, optimizer) for local in step.values() if local.host > after]
    named = ([_names(step, (place,)) for place in step.row_inputs] for step in steps)
    return [row for names in named if None not in names for row in zip(*filter(None, names), strict=True)]


def has_ended(trace: Trace) -> bool:
    """Return whether the program ended on every host (neither stopped at the last wanted step, nor raised)."""
    reasons = [event["reason"] for _, event in trace.of("end")]
    return len(reasons) == trace.num_hosts and set(reasons) == {"returned"}


def _ledger(name: str, reference: Sequence[StepOfAll], topology: Sequence[StepOfAll], ended: bool) -> Ledger:
    ledger = _of_names(name, reference, topology, ended, lambda step: step.rows)
    if ledger.is_known and not ledger.grows and ledger.first_apart is not None:
        return _by_data(name, reference, topology, ended) or ledger
    return ledger


def _of_names(
    name: str,
    reference: Sequence[StepOfAll],
    topology: Sequence[StepOfAll],
    ended: bool,
    names: Callable[[Step], Rows | None],
    by: tuple[int, ...] = (),
) -> Ledger:
    theirs, ours = (
        _known([{r: names(local) for r, local in step.items()} for step in steps]) for steps in (reference, topology)
    )
    hosts = {replica: local.host for step in topology for replica, local in step.items()}
    flat = tuple(tuple(row for rows in step.values() for row in rows) for step in theirs)
    return Ledger(name, flat, tuple(ours), hosts, ended and len(ours) == len(topology), by)


def _by_data(name: str, reference: Sequence[StepOfAll], topology: Sequence[StepOfAll], ended: bool) -> Ledger | None:
    """Return the ledger by the inputs that equal the reference's in every step: the model may compute others."""
    places = [local.row_inputs for step in (reference[0], topology[0]) for local in step.values()]
    if len(places[0]) < 2 or any(inputs != places[0] for inputs in places):
        return None

    def by(chosen: tuple[int, ...]) -> Ledger:
        return _of_names(name, reference, topology, ended, lambda step: _names(step, chosen), chosen)

    data = tuple(place for place in places[0] if by((place,)).is_same)
    ledger = by(data) if data else None
    if ledger is None or not ledger.is_same or len(ledger.reference) < len(reference) or len(ledger.topology) < len(topology):
        return None
    if any(len(set(rows)) < _DISTINCT * len(rows) for rows in ledger.reference):  # labels, say
        return None
    others = [place for place in places[0] if place not in data]
    return ledger if all(_is_close(reference[0], topology[0], data, place) for place in others) else None


def _is_close(reference: StepOfAll, topology: StepOfAll, data: tuple[int, ...], place: int) -> bool:
    """Return whether an input's examples differ by rounding or padding at most, before the model has changed."""
    theirs, ours = _by_row(reference, data, place), _by_row(topology, data, place)
    if theirs is None or ours is None or theirs.ndim != ours.ndim or len(theirs) != len(ours):
        return False
    theirs, ours = np.split(joined([theirs, ours], np.nan), 2)
    padding = np.where(np.isnan(ours), theirs, ours)[np.isnan(ours) != np.isnan(theirs)]
    if np.unique(padding).size > 1:  # with labels, say, it is not 0
        return False
    apart, size = np.nan_to_num(np.abs(ours - theirs)), np.nan_to_num(np.abs(theirs))
    return bool(apart.max(initial=0.0) <= _CLOSE * size.max(initial=0.0))


def _by_row(step: StepOfAll, data: tuple[int, ...], place: int) -> Floats | None:
    """Return an input's examples on all replicas, in the order of their names; None if it was not kept."""
    all_names: list[str] = []
    arrays: list[Floats] = []
    for _, local in sorted(step.items()):
        names, array = _names(local, data), local.inputs[place]
        if names is None or array is None or not array.is_complete or np.dtype(array.dtype).kind == "S":
            return None
        all_names += names
        arrays.append(array.read().astype(np.float64))
    return joined(arrays, np.nan)[np.argsort(all_names, kind="stable")]


def _names(step: Step, places: tuple[int, ...]) -> Rows | None:
    """Return the identity of each example by some of the inputs; None if they were not kept."""
    arrays = [step.inputs[place] if place < len(step.inputs) else None for place in places]
    whole = [array for array in arrays if array is not None and array.is_complete]
    return tuple(row_names([{"dense": array.read()} for array in whole])) if len(whole) == len(places) else None


def _known(steps: Sequence[Mapping[int, Rows | None]]) -> list[dict[int, Rows]]:
    """Return the steps up to the first one whose examples were not seen on every replica."""
    whole: list[dict[int, Rows]] = []
    for step in steps:
        rows = {replica: examples for replica, examples in sorted(step.items()) if examples is not None}
        if len(rows) < len(step):
            break
        whole.append(rows)
    return whole
