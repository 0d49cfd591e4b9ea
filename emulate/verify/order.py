"""Determine whether a program's training depends on the order of the examples in a batch.

Most does not: permuting the rows of a batch is the same training, rounded otherwise, which is what the noise floor is made of.
A step that mixes each row with its neighbour, or keeps something of a batch by place for the next one (a queue, the states of
streams), trains another model then, and the difference is none of rounding. What rounding makes of a program is told by runs
whose rows are in order and that are rounded much more coarsely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from emulate.probe.trace import StoredArray, Trace
from emulate.verify.arrays import aligned, finite_difference, is_numeric, norm
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll, gradients_of, names_of, objective, weight_of, weights_before
from emulate.verify.ledger import Ledger

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
    of_gradients = [_nearest(reference, permuted, _gradient_off, at).get((name, at), 0.0) for name, at in last.items()]
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
    off = _nearest(reference, permuted, _gradient_off)
    rounded = [_off(reference, trace, _gradient_off) for trace in in_order]
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
    by_run = [_off(reference, trace, measured, only) for trace in runs]
    return {place: min(of_run[place] for of_run in by_run) for place in (set.intersection(*map(set, by_run)) if by_run else ())}


def _off(
    reference: Trace, run: Trace, measured: Callable[[StepOfAll, StepOfAll], float], only: int | None = None
) -> dict[tuple[str, int], float]:
    return {
        (optimizer, k): measured(ours, theirs)
        for optimizer in reference.optimizers
        for k, (ours, theirs) in enumerate(zip(complete(run, optimizer), complete(reference, optimizer), strict=False))
        if only in (None, k)
    }


def objective_off(ours: StepOfAll, theirs: StepOfAll) -> float:
    """Return the relative distance of the losses of a step."""
    loss, other = objective(ours), objective(theirs)
    return 0.0 if loss is None or other is None else abs(loss - other) / (abs(other) or np.inf)


def update_off(traces: tuple[Trace, Trace], optimizer: str, k: int) -> float:
    """Return the relative distance of what two runs change all weights by in a step."""
    pairs = []
    for name in names_of(complete(traces[1], optimizer)[k]):
        stored = [
            array
            for trace in traces
            for array in (weights_before(trace, optimizer, k, name), weight_of(complete(trace, optimizer)[k], name))
        ]
        recorded = [array for array in stored if array is not None and is_numeric(array)]
        if len(recorded) == len(stored):
            before, after, other_before, other_after = aligned(recorded)
            pairs.append((after - before, other_after - other_before))
    size = sum(norm(other) ** 2 for _, other in pairs)
    return float(np.sqrt(sum(norm(change - other) ** 2 for change, other in pairs) / size)) if size else 0.0


def _gradient_off(ours: StepOfAll, theirs: StepOfAll) -> float:
    """Return the relative distance of the whole gradient."""
    pairs = _gradients(ours, theirs)
    return _distance(pairs) / (_norm(reference for _, reference in pairs) or np.inf)


def _gradients(ours: StepOfAll, theirs: StepOfAll) -> list[tuple[StoredArray | None, ...]]:
    return [tuple(next(iter(gradients_of(step, name).values()), None) for step in (ours, theirs)) for name in names_of(theirs)]


def _norm(arrays: Iterable[StoredArray | None]) -> float:
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
