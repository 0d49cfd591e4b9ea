"""Determine how one gradient is made of the replicas' gradients: known for an optimizer, measured for a custom loop.

Every optimizer of Keras adds the local gradients up, unless it is told that they are added up already (`skipped`): then each
replica has all of it. A loop that a probe saw through its tapes reduces them itself, as a sum or as a mean, where no probe can
see it; but the first step tells: the weights move by the one or by the other.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from emulate.probe.trace import Trace
from emulate.verify.arrays import Floats, aligned
from emulate.verify.gradients import StepOfAll, gradients_of, names_of, weight_of, weights_before

_PARALLEL = 0.99


def aggregation(topology: Trace, reference: Trace, optimizer: str) -> str:
    """Return `sum` or `mean`."""
    return _found(_Pair(topology, reference), optimizer)


class _Pair:
    """Hold two traces, identified by their folders."""

    def __init__(self, topology: Trace, reference: Trace) -> None:
        self.topology, self.reference = topology, reference

    @property
    def _folders(self) -> tuple[Path, Path]:
        return self.topology.directory, self.reference.directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pair) and self._folders == other._folders

    def __hash__(self) -> int:
        return hash(self._folders)


@lru_cache(maxsize=32)
def _found(pair: _Pair, optimizer: str) -> str:
    said = _said(pair.topology, optimizer)
    ours, theirs = pair.topology.steps(optimizer), pair.reference.steps(optimizer)
    if said == "replicated":
        return "mean"
    if not ours or not theirs or len(ours[0]) < 2 or said == "sum":
        return "sum"
    if _are_the_same(ours[0]):
        return "mean"
    added, whole = _gradients(pair, optimizer)
    moved, expected = _updates(pair, optimizer)
    if not np.dot(whole, whole) or not np.dot(added, whole):
        return "sum"
    factor = float(np.dot(added, whole) / np.dot(whole, whole))
    # Where the update tells nothing (replicas that drifted apart, an update not along the gradient): what fits the reference.
    target = _along(moved, expected) or 1.0
    distances = {"sum": abs(np.log(abs(factor / target))), "mean": abs(np.log(abs(factor / len(ours[0]) / target)))}
    return min(distances, key=lambda how: distances[how])


def _said(trace: Trace, optimizer: str) -> str:
    """Return what the probe saw: `replicated` (applied after `Strategy.reduce`), `skipped` (not summed), `tape`, or `sum`."""
    if any(event.get("tape") for _, event in trace.of("step") if event["optimizer"] == optimizer):
        return "tape"
    facts = (event.get("optimizers", {}).get(optimizer, {}) for _, event in trace.of("program"))
    return next((str(entry["aggregation"]) for entry in facts if entry.get("aggregation")), "sum")


def _are_the_same(step: StepOfAll) -> bool:
    """Return whether the program has summed before: the gradients of all replicas are equal bit by bit."""
    first, *others = (step[replica].gradients for replica in sorted(step))
    return all(
        other.keys() == first.keys() and all(np.array_equal(other[name].read(), first[name].read()) for name in first)
        for other in others
    )


def _gradients(pair: _Pair, optimizer: str) -> tuple[Floats, Floats]:
    """Return the sum of the first local gradients and the reference's first gradients, all tensors together."""
    ours, theirs = pair.topology.steps(optimizer)[0], pair.reference.steps(optimizer)[0]
    added, whole = [np.zeros(0)], [np.zeros(0)]
    for tensor in names_of(theirs):
        mine, other = gradients_of(ours, tensor), gradients_of(theirs, tensor)
        if mine and other:
            arrays = aligned([*mine.values(), *other.values()])
            added.append(np.sum(arrays[: len(mine)], axis=0))
            whole.append(np.sum(arrays[len(mine) :], axis=0))
    return np.concatenate(added), np.concatenate(whole)


def _updates(pair: _Pair, optimizer: str) -> tuple[Floats, Floats]:
    """Return how the first step moved the weights, in the topology and in the reference."""
    ours, theirs = pair.topology.steps(optimizer)[0], pair.reference.steps(optimizer)[0]
    moved, expected = [np.zeros(0)], [np.zeros(0)]
    for tensor in names_of(theirs):
        stored = [
            weight_of(ours, tensor),
            weights_before(pair.topology, optimizer, 0, tensor),
            weight_of(theirs, tensor),
            weights_before(pair.reference, optimizer, 0, tensor),
        ]
        if None not in stored:
            a, b, c, d = aligned([array for array in stored if array is not None])
            moved.append(a - b)
            expected.append(c - d)
    return np.concatenate(moved), np.concatenate(expected)


def _along(moved: Floats, expected: Floats) -> float | None:
    """Return by what factor the weights moved further; None unless they moved in the same direction."""
    sizes = float(np.sqrt(np.dot(moved, moved) * np.dot(expected, expected)))
    both = float(np.dot(moved, expected))
    return both / float(np.dot(expected, expected)) if sizes and both / sizes > _PARALLEL else None
