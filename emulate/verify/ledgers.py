"""Relate the examples of two traces: the ledger of each step, columns that hosts have scaled, and whether the order matters.

The order of the examples in a batch matters to few programs: permuting the rows is the same training, rounded otherwise, which
is what the noise floor is made of. A step that mixes each row with its neighbour, or keeps something of a batch by place for
the next one (a queue, the states of streams), trains another model then, and the difference is none of rounding. What rounding
makes of a program is told by runs whose rows are in order and that are rounded much more coarsely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from emulate.trace import Step, StoredArray, Trace, joined, row_names
from emulate.verify.compared_runs import complete, updates
from emulate.verify.gradients import (
    Floats,
    StepOfAll,
    aligned,
    finite_difference,
    gradients_of,
    is_numeric,
    names_of,
    norm,
    objective,
    weight_of,
)
from emulate.verify.ledger import Ledger, Rows

_DISTINCT = 0.9
"""So many of a step's rows must differ in what is to tell them apart."""
_CLOSE = 1e-3
"""Largest relative difference between outputs of the same weights for the same rows."""
_ROUNDED = 1e-4
"""Largest relative difference between examples that another model has computed, which both runs have trained."""
_EQUAL_WEIGHTS = 1e-5
"""Largest relative difference between weights that are the same up to rounding."""


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
    """Return the ledger by the inputs that equal the reference's in every step: the model may compute others.

    What is as long as a batch in one run alone (a weight for each class, keys of the whole batch) has no examples.
    """
    every = [local.row_inputs for step in (reference[0], topology[0]) for local in step.values()]
    places = [place for place in every[0] if all(place in inputs for inputs in every)]
    if max(map(len, every)) < 2:
        return None

    def by(chosen: tuple[int, ...]) -> Ledger:
        return _of_names(name, reference, topology, ended, lambda step: _names(step, chosen), chosen)

    data = tuple(place for place in places if by((place,)).is_same)
    ledger = by(data) if data else None
    if ledger is None or not ledger.is_same or len(ledger.reference) < len(reference) or len(ledger.topology) < len(topology):
        return None
    others = [place for place in places if place not in data]
    are_distinct = all(len(set(rows)) >= _DISTINCT * len(rows) for rows in ledger.reference)
    # What labels, say, leave open the rest must say: in each step, and in the order of the rows with one label.
    pairs = _at_equal_weights(reference, topology) if are_distinct else zip(reference, topology, strict=False)
    most = _CLOSE if are_distinct else _ROUNDED
    return ledger if all(_is_close(*pair, data, place, most) for pair in pairs for place in others) else None


def _at_equal_weights(reference: Sequence[StepOfAll], topology: Sequence[StepOfAll]) -> Iterator[tuple[StepOfAll, StepOfAll]]:
    """Yield the steps that both runs begin with equal weights, up to rounding: there a model computes equal inputs."""
    for theirs, ours in zip(reference, topology, strict=False):
        yield theirs, ours
        pairs = [(weight_of(theirs, name), weight_of(ours, name)) for name in names_of(theirs)]
        if _distance(pairs) > _EQUAL_WEIGHTS * _size(array for array, _ in pairs):
            return


def _is_close(reference: StepOfAll, topology: StepOfAll, data: tuple[int, ...], place: int, most: float) -> bool:
    """Return whether an input's examples differ by rounding, as a part of the largest number at most, or by padding."""
    theirs, ours = _by_row(reference, data, place), _by_row(topology, data, place)
    if theirs is None or ours is None or theirs.ndim != ours.ndim or len(theirs) != len(ours):
        return False
    theirs, ours = np.split(joined([theirs, ours], np.nan), 2)
    padding = np.where(np.isnan(ours), theirs, ours)[np.isnan(ours) != np.isnan(theirs)]
    if np.unique(padding).size > 1:  # with labels, say, it is not 0
        return False
    apart, size = np.nan_to_num(np.abs(ours - theirs)), np.nan_to_num(np.abs(theirs))
    return bool(apart.max(initial=0.0) <= most * size.max(initial=0.0))


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


_FEWEST_ROWS = 8
"""Rows that a line through two of them must fit."""
_CLOSE_COLUMNS = 1e-4
"""Largest distance from the line, as part of a column's spread: values were computed in 32 bits."""
_MANY_STEPS = 4


def shifted_columns(reference: Trace, topology: Trace) -> str | None:
    """Return in words how the hosts' examples come from those of one device, by a factor and a sum for each column.

    Args:
        reference: The run on one device.
        topology: A run on several hosts with as many examples in each step.

    Returns:
        The numbers of a column on two hosts; None where other examples are not made so, or all hosts have the same numbers.
    """
    for name in topology.optimizers if topology.num_hosts > 1 else ():
        ours, theirs = (complete(trace, name)[:_MANY_STEPS] for trace in (topology, reference))
        if not (ours and theirs and ours[0] and theirs[0]):
            continue
        for place in next(iter(theirs[0].values())).row_inputs:
            for by_host in _paired(ours, theirs, place):
                lines = [_scale_and_shift(*pair) for pair in by_host]
                if all(line is not None for line in lines) and (
                    text := _columns_apart([line for line in lines if line is not None])
                ):
                    return f"Flattened argument {place} of the step: {text}"
    return None


def _paired(ours: Sequence[StepOfAll], theirs: Sequence[StepOfAll], place: int) -> Iterator[list[tuple[Floats, Floats]]]:
    """Yield, for each way to share rows out, by host its rows and those of one device: every n-th one, or neighbors."""
    hosts = sorted({local.host for local in ours[0].values()})
    whole = _steps_of(theirs, place, None)
    shares = [_steps_of(ours, place, host) for host in hosts]
    if not whole or not all(shares) or any(len(step) % len(hosts) for step in whole):
        return
    for is_dealt in (True, False):
        pairs = []
        for number, of_host in enumerate(shares):
            parts = [step[number :: len(hosts)] if is_dealt else np.split(step, len(hosts))[number] for step in whole]
            mine, one_device = joined(of_host), joined(parts)
            if mine.shape == one_device.shape and len(mine) >= _FEWEST_ROWS:
                pairs.append((mine, one_device))
        if len(pairs) == len(hosts):
            yield pairs


def _steps_of(steps: Sequence[StepOfAll], place: int, host: int | None) -> list[Floats]:
    """Return the rows of a host, or of all of them, by step; nothing where not all were kept."""
    tables = [_table_of_rows([local for local in step.values() if host in (None, local.host)], place) for step in steps]
    whole = [rows for rows in tables if rows is not None]
    return whole if len(whole) == len(tables) else []


def _table_of_rows(replicas: Sequence[Step], place: int) -> Floats | None:
    """Return all rows of some replicas as a table of floats; None where they were not kept, or are no floats."""
    stored = [replica.inputs[place] for replica in replicas]
    arrays = [array.read() for array in stored if array is not None and array.is_complete]
    if len(arrays) < len(stored) or any(array.ndim < 2 or array.dtype.kind != "f" for array in arrays):
        return None
    table = joined(arrays).astype(np.float64)
    return table.reshape(len(table), math.prod(table.shape[1:]))  # not -1: a replica may have no rows


def _scale_and_shift(mine: Floats, theirs: Floats) -> tuple[Floats, Floats] | None:
    """Return the factor and the sum that make each column of one device that of a host; None where none do."""
    center, own = theirs.mean(axis=0), mine.mean(axis=0)
    spread = np.sum((theirs - center) ** 2, axis=0)
    varies = spread > 0
    if not varies.any():
        return None
    factor = np.where(varies, np.sum((theirs - center) * (mine - own), axis=0) / np.where(varies, spread, 1.0), 1.0)
    shift = own - factor * center
    off = np.abs(mine - factor * theirs - shift).max(axis=0)
    is_close = bool((off <= _CLOSE_COLUMNS * (np.abs(mine - own).max(axis=0) + np.abs(own) + _CLOSE_COLUMNS)).all())
    return (factor, shift) if is_close else None


def _columns_apart(lines: Sequence[tuple[Floats, Floats]]) -> str:
    """Return the column in which two hosts differ most, in words; nothing where all have the same numbers."""
    (factor, shift), others = lines[0], lines[1:]
    gaps = np.array([np.abs(its_factor - factor) + np.abs(its_shift - shift) for its_factor, its_shift in others])
    host, column = (int(at) for at in np.unravel_index(int(np.argmax(gaps)), gaps.shape))
    if gaps[host, column] <= _CLOSE_COLUMNS:
        return ""
    its_factor, its_shift = others[host]
    return (
        f"column {column} of host 0 is that of one device times {factor[column]:.4g} plus {shift[column]:.4g}, "
        f"of host {host + 1} times {its_factor[column]:.4g} plus {its_shift[column]:.4g}"
    )


COARSE = 64.0
"""By so many units in the last place gradients are off in runs that tell what rounding alone makes of a training."""
_WIDE, _WIDE_OBJECTIVE = 3e-3, 1e-4
"""Noise of this part of the whole gradient, or of the loss, may hide a bug."""
_TIMES = 100.0
"""Coarse rounding is at least what another order rounds: where that is so many times as far off, it is no rounding."""


def is_wide(reference: Trace, permuted: Sequence[Trace]) -> bool:
    """Return whether runs with permuted examples differ so much in weights or losses that bugs may hide.

    Args:
        reference: The run on one device.
        permuted: The same with the rows of each batch permuted, each differently.

    Returns:
        True where all of them do: in the loss of some step, or the gradient of the last one.
    """
    of_losses = _nearest(reference, permuted, objective_off).values()
    last = {optimizer: len(complete(reference, optimizer)) - 1 for optimizer in reference.optimizers}
    of_gradients = [_nearest(reference, permuted, gradient_off, at).get((name, at), 0.0) for name, at in last.items()]
    return any(off > _WIDE_OBJECTIVE for off in of_losses) or any(off > _WIDE for off in of_gradients)


def order_widens(reference: Trace, permuted: Sequence[Trace], in_order: Sequence[Trace]) -> bool:
    """Return whether the order of the examples, and not rounding, makes permuted runs so different.

    Args:
        reference: The run on one device.
        permuted: The same with the rows of each batch permuted, each differently.
        in_order: The same with rows in order, and gradients off by `COARSE` units.

    Returns:
        True where in some step the gradients of all permuted runs are far off, and those of no run in order nearly so.
    """
    off = _nearest(reference, permuted, gradient_off)
    rounded = [_off_in_steps(reference, trace, gradient_off) for trace in in_order]
    return bool(rounded) and any(
        off[place] > max(_WIDE, _TIMES * max(_by_rounding(of_run, *place) for of_run in rounded)) for place in off
    )


def _by_rounding(off: Mapping[tuple[str, int], float], optimizer: str, step: int) -> float:
    """Return how far off a run in order is in a step, or in the next one.

    It is a step behind: in the first it has the reference's weights, and so the bits of its forward pass, which permuted rows
    round otherwise where statistics of the batch are in it. A deep network makes much of that, and more in each step.
    """
    return max(off.get((optimizer, step), np.inf), off.get((optimizer, step + 1), 0.0))


def _nearest(
    reference: Trace, runs: Sequence[Trace], measured: Callable[[StepOfAll, StepOfAll], float], only: int | None = None
) -> dict[tuple[str, int], float]:
    """Return, by optimizer and step, the distance of the nearest run, for the steps that all runs have."""
    by_run = [_off_in_steps(reference, trace, measured, only) for trace in runs]
    return {place: min(of_run[place] for of_run in by_run) for place in (set.intersection(*map(set, by_run)) if by_run else ())}


def _off_in_steps(
    reference: Trace, run: Trace, measured: Callable[[StepOfAll, StepOfAll], float], only: int | None = None
) -> dict[tuple[str, int], float]:
    return {
        (optimizer, k): measured(ours, theirs)
        for optimizer in reference.optimizers
        for k, (ours, theirs) in enumerate(zip(complete(run, optimizer), complete(reference, optimizer), strict=False))
        if only in (None, k)
    }


_ROUNDING = 1e-3
"""So far apart, relative to itself, the gradient of a variable is not one that rounding leaves as it is."""


def objective_off(ours: StepOfAll, theirs: StepOfAll) -> float:
    """Return the relative distance of the losses of a step."""
    loss, other = objective(ours), objective(theirs)
    return 0.0 if loss is None or other is None else abs(loss - other) / (abs(other) or np.inf)


def updates_off(one: Trace, other: Trace, optimizer: str) -> float:
    """Return the relative distance of what two runs change the weights by, in the step in which it is largest.

    Variables whose gradient is rounding alone, such as a bias before a normalization, are left out from then on: Adam makes of
    such a gradient a whole step, whose sign is that of the rounding.
    """
    rounded, most = set[str](), 0.0
    for k, (ours, theirs) in enumerate(zip(complete(one, optimizer), complete(other, optimizer), strict=False)):
        rounded |= _rounded_gradients(ours, theirs)
        change, expected = updates(one, other, optimizer, k, leaving=rounded)
        most = max(most, norm(change - expected) / (norm(expected) or np.inf))
    return most


def _rounded_gradients(ours: StepOfAll, theirs: StepOfAll) -> set[str]:
    """Return variables with another gradient in two runs whose whole gradients agree."""
    pairs = _gradient_pairs(ours, theirs)
    of_all = _size(array for _, array in pairs.values())
    if _distance(pairs.values()) > _ROUNDING * of_all:
        return set()
    return {name for name, pair in pairs.items() if _distance([pair]) > _ROUNDING * _size(pair[1:])}


def gradient_off(ours: StepOfAll, theirs: StepOfAll) -> float:
    """Return the relative distance of the whole gradient."""
    pairs = _gradient_pairs(ours, theirs).values()
    return _distance(pairs) / (_size(array for _, array in pairs) or np.inf)


def _gradient_pairs(ours: StepOfAll, theirs: StepOfAll) -> dict[str, tuple[StoredArray | None, ...]]:
    return {
        name: tuple(next(iter(gradients_of(step, name).values()), None) for step in (ours, theirs)) for name in names_of(theirs)
    }


def _size(arrays: Iterable[StoredArray | None]) -> float:
    """Return the L2 norm of arrays taken together."""
    squares = [norm(aligned([array])[0]) ** 2 for array in arrays if array is not None and is_numeric(array)]
    return float(np.sqrt(sum(squares)))


def _distance(pairs: Iterable[tuple[StoredArray | None, ...]]) -> float:
    """Return the L2 norm of the differences of arrays taken together."""
    squares = []
    for array, other in pairs:
        if array is not None and other is not None and is_numeric(other) and array.shape == other.shape:
            squares.append(norm(finite_difference(*aligned([array, other]))[0]) ** 2)
    return float(np.sqrt(sum(squares)))


def is_in_order(ledger: Ledger) -> bool:
    """Return whether the replicas' examples, one after the other, follow the reference's order in every step."""
    pairs = zip(ledger.expected, ledger.topology, strict=False)
    return all(tuple(row for _, rows in sorted(step.items()) for row in rows) == expected for expected, step in pairs)
