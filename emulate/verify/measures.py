"""Measure every tensor of every step of a comparison: what it starts with, each step, what it reports and ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from emulate.trace import StoredArray, Trace
from emulate.verify.compared_runs import Runs, complete, unit_of_all
from emulate.verify.gradients import (
    Floats,
    StepOfAll,
    aligned,
    copies_of,
    eps_of,
    finite_difference,
    gradients_of,
    is_numeric,
    largest,
    names_of,
    norm,
    objective,
    state_of,
    total,
    weight_of,
)
from emulate.verify.measure import Measure, coarsest_unit, final_weights, measure, reports, same_shape
from emulate.verify.noise import REPORTED, Key

_OF_CHANCE = 0.1
"""Relative change of a variable if the rows of each batch are permuted. From this change on the variable stores rows (a queue).
Their order means nothing, so its values are compared sorted."""


def measure_all(runs: Runs) -> Iterator[Measure]:
    """Yield every measure of a comparison: initial weights, each step, final weights, reports."""
    late = {name for name, count in _made_before(runs.as_they_came.reference).items() if count}
    yield from _as_far_as_weights(_initial(runs.as_they_came), _apart_before(runs, but=late) if late else [])
    for optimizer in runs.optimizers:
        others = [complete(trace, optimizer) for trace in runs.others]
        for k, (ours, theirs) in enumerate(runs.pairs(optimizer)):
            beside = [steps[k] if k < len(steps) else {} for steps in others]
            yield from _gradients(runs, optimizer, k, ours, theirs, beside)
            yield from _variables(runs, ("weight", optimizer, k), ours, theirs, beside)
            yield from _variables(runs, ("variable", optimizer, k), ours, theirs, beside)
            yield from _objective(runs, optimizer, k, ours, theirs, beside)
    yield from reports(runs)
    if runs.source is None:
        yield from final_weights(runs)
    elif not runs.reference.has_other_examples:
        evaluated = {report.name for report in runs.reference.reports}
        measures = (*final_weights(runs.as_they_came), *reports(runs.as_they_came))
        of_program = [m for m in measures if m.key.tensor not in evaluated]
        yield from _as_far_as_weights(of_program, _apart_before(runs) if of_program else [])


@dataclass(frozen=True)
class _Apart:
    """Hold how far the weights of two runs are apart that went their own ways.

    Attributes:
        largest: The largest difference of an element.
        relative: Of the norms of differences over those of weights the median: few tensors whose gradients are rounding alone
            drift in any case.
    """

    largest: float = 0.0
    relative: float = 0.0


def _as_far_as_weights(measures: Iterable[Measure], apart: Sequence[_Apart]) -> Iterator[Measure]:
    """Yield numbers of two runs that went their own ways: they may be as far apart as the weights before that step."""
    for m in measures:
        if apart:
            at = apart[min(m.step if m.at is None else m.at, len(apart) - 1)]
            spread = at.relative * m.scale if m.key.kind in REPORTED else at.largest
            m = replace(m, spread=float(np.fmax(m.spread, spread)))
        yield m


def _apart_before(runs: Runs, *, but: Collection[str] = ()) -> list[_Apart]:
    """Return how far the weights are apart before each step.

    Args:
        runs: The runs.
        but: Names of weights that are left out.

    Returns:
        Nothing where the reference went its own way.
    """
    if runs.source is None:
        return []
    apart = [_Apart()]
    for optimizer in runs.optimizers:
        pairs = zip(complete(runs.topology, optimizer), complete(runs.source, optimizer), strict=False)
        for step, (ours, theirs) in enumerate(pairs, 1):
            apart += [apart[-1]] * (step + 1 - len(apart))
            names = dict.fromkeys(name for local in theirs.values() for name in local.weights if name not in but)
            both = [(weight_of(ours, name), weight_of(theirs, name)) for name in names]
            comparable = [(a, b) for a, b in both if a is not None and b is not None and is_numeric(b) and same_shape([a, b])]
            arrays = [finite_difference(*aligned([*pair])) for pair in comparable]
            offs = [norm(off) / (norm(b) or 1.0) for off, b in arrays]
            here = _Apart(max((largest(off) for off, _ in arrays), default=0.0), float(np.median(offs)) if offs else 0.0)
            so_far = (apart[step], apart[step - 1], here)
            apart[step] = _Apart(max(distance.largest for distance in so_far), max(distance.relative for distance in so_far))
    return apart


def _initial(runs: Runs) -> Iterator[Measure]:
    """First values. Those of variables that come once others were trained may be made of these, as what is restored is.

    The noise runs, where a program seeds nothing, start from weights of their own: they say something of such variables alone.
    """
    ours, theirs, *others = [_first_values(trace) for trace in (runs.topology, runs.reference, *runs.others)]
    steps_before = _made_before(runs.reference)
    for tensor in theirs:
        if tensor not in ours or not is_numeric(theirs[tensor]):
            continue
        stored = [values.get(tensor, theirs[tensor]) for values in others] if steps_before[tensor] else []
        if same_shape([ours[tensor], theirs[tensor], *stored]):
            arrays = aligned([ours[tensor], theirs[tensor], *stored])
            key, eps = Key("initial-weight", "", tensor), eps_of(theirs[tensor].dtype)
            yield measure(key, steps_before[tensor], arrays, len(runs.noise), eps=eps)


def _first_values(trace: Trace) -> dict[str, StoredArray]:
    values: dict[str, StoredArray] = {}
    for _, variables in sorted(trace.variables("initial").items()):
        for name, variable in variables.items():
            if variable.array is not None:
                values.setdefault(name, variable.array)
    return values


def _made_before(trace: Trace) -> dict[str, int]:
    """Return, by variable, the steps of any optimizer on its host before it was first seen."""
    steps: Counter[tuple[int, str, int]] = Counter()
    first_seen: dict[str, int] = {}
    for host, event in trace.events:
        if event["event"] == "step":
            steps[(host, event["optimizer"], event["replica"])] += 1
        elif event["event"] == "initial":
            before = max((count for (place, _, _), count in steps.items() if place == host), default=0)
            first_seen |= {name: before for name in event["variables"] if name not in first_seen}
    return first_seen


def _gradients(
    runs: Runs, optimizer: str, k: int, ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    how = runs.how(optimizer)
    for tensor in names_of(theirs):
        mine, reference = gradients_of(ours, tensor), gradients_of(theirs, tensor)
        if not mine or not reference or not same_shape([*mine.values(), *reference.values()]):
            continue
        stored = [gradients_of(step, tensor) for step in beside]
        arrays = aligned([*mine.values(), *reference.values(), *(a for gradients in stored for a in gradients.values())])
        local, arrays = arrays[: len(mine)], arrays[len(mine) :]
        other, arrays = total(arrays[: len(reference)], how), arrays[len(reference) :]
        totals = _totals(arrays, [len(gradients) for gradients in stored], other, how)
        yield measure(
            Key("gradient", optimizer, tensor),
            k,
            [total(local, how), other, *totals],
            len(runs.noise),
            eps=unit_of_all([*reference.values(), *mine.values()], runs.computed),
            scale=max(largest(array) for array in local),
        )


def _totals(arrays: list[Floats], counts: list[int], missing: Floats, how: str) -> list[Floats]:
    """Return one gradient for each noise run; the reference's own if a run does not have it."""
    totals = []
    for count in counts:
        totals.append(total(arrays[:count], how) if count else missing)
        arrays = arrays[count:]
    return totals


def _variables(
    runs: Runs, what: tuple[str, str, int], ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    kind, optimizer, k = what
    value_of = weight_of if kind == "weight" else state_of
    for tensor in dict.fromkeys(
        name for step in theirs.values() for name in (step.weights if kind == "weight" else step.state)
    ):
        a, b = value_of(ours, tensor), value_of(theirs, tensor)
        if a is None or b is None or not (is_numeric(b) or kind == "variable") or not same_shape([a, b]):
            continue
        stored = [value_of(step, tensor) for step in beside]
        copies = copies_of(ours, tensor) if kind == "weight" else []
        arrays = aligned([*copies, a, b, *(array for array in stored if array is not None)])
        # Each replica may keep its part of a sum, which an optimizer adds up later.
        summed, arrays = total(arrays[: len(copies)], "sum"), arrays[len(copies) :]
        if copies and norm(finite_difference(summed, arrays[1])[0]) < norm(finite_difference(*arrays[:2])[0]):
            arrays[0] = summed
        rest = iter(arrays[2:])
        compared = [*arrays[:2], *(arrays[1] if array is None else next(rest) for array in stored)]
        key, eps, many = Key(kind, optimizer, tensor), eps_of(b.dtype), len(runs.noise)
        if kind == "variable" and tensor in runs.of_first:
            key = replace(key, kind="of-first")
        measured = measure(key, k, compared, many, eps=eps)
        if key.kind == "variable" and measured.spread > _OF_CHANCE * measured.scale:
            in_order = [np.sort(array, axis=0) if array.ndim else array for array in compared]
            measured = measure(key, k, in_order, many, eps=eps)
            measured = replace(measured, is_of_chance=measured.spread > _OF_CHANCE * measured.scale)
        yield measured


def _objective(
    runs: Runs, optimizer: str, k: int, ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    values = [objective(step) for step in (ours, theirs, *beside)]
    if values[0] is None or values[1] is None:
        return
    numbers = [np.array([values[1] if value is None else value]) for value in values]
    key, eps = Key("objective", optimizer, "objective"), coarsest_unit(runs, theirs)
    yield measure(key, k, numbers, len(runs.noise), eps=eps)
