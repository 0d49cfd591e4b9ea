"""Detect tensors that do not suit a replica: of another replica, split although static, constants, or cached random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate.trace import Step, row_names
from emulate.verify.case import Case
from emulate.verify.causes.cause import GENERAL, Cause, Sign, names_in_words, numbers
from emulate.verify.causes.replays import REPLAY
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll
from emulate.verify.lines import Blame, made


def _search_crossings(case: Case) -> Sign | None:
    crossings = case.lines.crossings()
    if not crossings or case.base.is_equivalent:
        return None
    first = crossings[0]
    operations = "operation" if first["number"] == 1 else "operations"
    return Sign(
        f"Replica {first['replica']} computes its loss with a tensor of replica {first['of']}.",
        f"{first['number']} {operations} of one replica (first {first['operation']}) take, from no collective, a "
        "tensor that another replica has made of its own examples",
        [GENERAL, _OF_KERAS] if case.facts.compiled else None,
        then=lambda: case.cut(0, "a replica computes with another replica's tensor"),
    )


_OF_KERAS = "With losses that Keras keeps on layers"


CROSS_REPLICA_TENSOR = Cause(
    "cross-replica-tensor",
    _search_crossings,
    blame=(Blame("loss", lambda lines: [entry for event in lines.crossings() for entry in event["lines"]]),),
)


_Values = NDArray[Any]
_STEPS = 3
"""Number of equal steps from which an argument is not a batch."""
_CLOSE = 1e-4
"""Tolerance of values that were normalized in 32 bits."""


def _search_split(case: Case) -> Sign | None:
    for alone, ours in _steps(case) if not case.base.is_equivalent else ():
        arrays = _arrays(alone)
        static, lengths = _same(arrays), _lengths(arrays)
        # Labels are as long as the batch, and may be constant, too.
        split = [item for item in _split(static, ours) if lengths and len(static[item[0]]) not in lengths]
        # Several rows for each example may be what each example needs: then gradients differ for another reason, or do not.
        each = [item for item in split if any(len(static[item[0]]) % length == 0 for length in lengths)]
        if each and case.find_first_unexplained() is None:
            split = [item for item in split if item not in each]
        if split:
            then = partial(case.cut, 0, "each replica has another part of a tensor that must be the same on all")
            return replace(_sign_of_split(static, split), then=then)
    return None


def of_split_of_batch(case: Case) -> Sign | None:
    """Check for a static tensor with the length of the batch, if each replica's examples alone explain everything."""
    for alone, ours in _steps(case):
        arrays = _arrays(alone)
        lengths, same = _lengths(arrays), _same(arrays)
        long = {at: array for at, array in same.items() if len(array) in lengths and array.ndim > 1 and array.dtype.kind == "f"}
        # Labels have no distinct rows.
        tables = {at: array for at, array in long.items() if len(set(row_names([{"dense": array}]))) == len(array)}
        static = {at: array for at, array in same.items() if at in tables or _relates_rows(array)}
        if split := sorted(_split(static, ours), key=lambda item: not _relates_rows(static[item[0]])):
            sign = _sign_of_split(static, split, f"; {REPLAY} has the same gradients")
            # It is this tensor's rows that a row depends on, not those of its batch.
            return replace(sign, then=partial(case.withdraw, "in-batch-negatives"))
    return None


def _steps(case: Case) -> Iterator[tuple[list[Step], list[StepOfAll]]]:
    """Yield the first steps of each optimizer, on one device and on several replicas."""
    for name in case.reference.optimizers:
        ours, theirs = complete(case.untouched, name)[:_STEPS], complete(case.plain, name)[:_STEPS]
        if len(ours) < 2 or len(theirs) < 2 or len(ours[0]) < 2:
            continue
        yield [step[min(step)] for step in theirs], ours


def _split(static: Mapping[int, _Values], ours: list[StepOfAll]) -> list[tuple[int, list[int]]]:
    return [(at, shares) for at in static if (shares := _shares(static[at], at, ours))]


def _sign_of_split(static: Mapping[int, _Values], split: list[tuple[int, list[int]]], besides: str = "") -> Sign:
    at, shares = split[0]
    shape = list(static[at].shape)
    which = f"argument {at} (shape {shape})" + (f" and {len(split) - 1} more" if len(split) > 1 else "")
    return Sign(
        f"A static tensor with {shape[0]} rows is split over the replicas: none of them has all of it.",
        f"Flattened {which} of the step is the same in every step on one device; the replicas have "
        f"{numbers(shares)} of its rows, which together are the tensor{besides}",
    )


def _arrays(steps: list[Step]) -> dict[int, list[_Values]]:
    """Return, by place, the arguments that were recorded in all steps and have rows."""
    arrays = {at: [_whole(step, at) for step in steps] for at in range(min(len(step.inputs) for step in steps))}
    recorded = {at: [array for array in of_steps if array is not None] for at, of_steps in arrays.items()}
    return {at: of_steps for at, of_steps in recorded.items() if len(of_steps) == len(steps) and of_steps[0].ndim}


def _lengths(arrays: Mapping[int, list[_Values]]) -> set[int]:
    """Return the lengths of the arguments that change."""
    same = _same(arrays)
    return {len(array) for at, of_steps in arrays.items() if at not in same for array in of_steps}


def _same(arrays: Mapping[int, list[_Values]]) -> dict[int, _Values]:
    """Return the arguments that no step changes."""
    return {at: of_steps[0] for at, of_steps in arrays.items() if all(np.array_equal(of_steps[0], array) for array in of_steps)}


def _relates_rows(array: _Values) -> bool:
    """Return whether it is an adjacency, a similarity or a distance: symmetric, or normalized by row or column.

    A mask that is the same for all rows is none, and neither are one-hot rows.
    """
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.dtype.kind not in "fbiu":
        return False
    wide = array.astype(np.float64)
    if (wide == wide[:1]).all() or (np.count_nonzero(wide, axis=1) < 2).all():
        return False
    sums = [wide.sum(axis=axis) for axis in (0, 1) if (wide >= 0).all()]
    return np.allclose(wide, wide.T, _CLOSE) or any(np.allclose(total, 1.0, _CLOSE) for total in sums)


def _whole(step: Step, at: int) -> _Values | None:
    stored = step.inputs[at] if at < len(step.inputs) else None
    return stored.read() if stored is not None and stored.is_complete else None


def _shares(tensor: _Values, at: int, steps: list[StepOfAll]) -> list[int]:
    """Return how many rows of a static tensor each replica has; empty unless together they are the tensor.

    Where a tensor repeats the part of a replica, that part has all that it says: rows that are all equal, or positions that
    begin again with each example.
    """
    parts = [_whole(local, at) for _, local in sorted(steps[0].items())]
    matching = [part for part in parts if part is not None and part.shape[1:] == tensor.shape[1:]]
    if len(matching) < len(parts) or not np.array_equal(np.concatenate(matching), tensor):
        return []
    if all(np.array_equal(np.resize(part, tensor.shape), tensor) for part in matching):
        return []
    return [len(part) for part in matching]


def _search_in_graph(case: Case) -> Sign | None:
    constants = sorted(case.facts.constants, key=lambda constant: -int(constant["bytes"]))
    if not constants:
        return None
    largest = constants[0]
    copies = int(largest["copies"])
    size = f"{int(largest['bytes']) / 2**20:.0f} MiB"
    more = f"; {len(constants) - 1} more such constants" if len(constants) > 1 else ""
    return Sign(
        f"An array of {size} is a constant of the graph ({largest['where'] or 'in a library'}).",
        f"{largest['dtype']}{largest['shape']} was written into a graph {copies} time{'s' if copies > 1 else ''}{more}. "
        "Such an array costs seconds and several copies in memory; above 2 GB TensorFlow raises an error",
        places=[str(largest["where"])],
    )


def _search_cached(case: Case) -> Sign | None:
    cached = case.facts.cached
    if not cached:
        return _search_drawn_again(case)
    return Sign(
        f"Random numbers before cache() are drawn only once: every epoch has the same {names_in_words(cached)}.",
        f"Random stages before the pipeline's cache(): {', '.join(cached)}. One device does the same",
    )


def _search_drawn_again(case: Case) -> Sign | None:
    """Check for a map whose draws begin anew in each epoch, since the program sets a seed: examples come back as they were."""
    stages = [str(stage["stage"]) for stage in case.facts.drawing if stage["seeds"]]
    is_seeded = any(event["generator"] == "tensorflow" for _, event in case.plain.of("seeded"))
    times = Counter(row for rows in case.ledger.reference for row in rows) if case.ledger else {}
    again = sum(number > 1 for number in times.values())
    if not stages or not is_seeded or 2 * again <= len(times):
        return None
    summary = f"Every epoch has the same random numbers in {names_in_words(stages)}, because the program sets a seed."
    evidence = f"{again} of {len(times)} examples come more than once with the same content. One device does the same"
    return Sign(summary, evidence, _OF_A_SEED, blame=(made("examples", "map"),))


_OF_A_SEED = "If a map draws with a seed"
STATIC_SPLIT = Cause(
    "static-tensor-split",
    _search_split,
    unless=("replicas-missing",),
    blame=(made("examples", "from_tensors", "distribute"),),
)

STATIC_IN_GRAPH = Cause("static-tensor-in-graph", _search_in_graph, advice=True, blame=(made("start"),))

CACHED_RANDOMNESS = Cause("cached-randomness", _search_cached, advice=True, blame=(made("examples", "cache"),))
