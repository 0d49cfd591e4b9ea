"""Hold the traces of one comparison, and the steps that can be compared.

`aggregation` determines how one gradient is made of the replicas' gradients. Every optimizer of Keras adds the local gradients
up, unless it is told that they are added up already (`skipped`): then each replica has all of it. A loop that a probe saw
through its tapes reduces them itself, as a sum or as a mean, where no probe can see it; but the first step tells: the weights
move by the one or by the other.

`computed_in` determines in what precision gradients were computed: mixed precision stores in float32 what it rounded to 16
bits. Permuting the rows of a 16-bit program shows little: sums are accumulated in 32 bits and rounded once, and the order of
the rows seldom changes how. On several replicas each partial sum is rounded by itself. So the unit in the last place that
counts is that of the computation, and the noise runs must be disturbed by that much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from emulate.trace import Array, Facts, Step, StoredArray, Trace
from emulate.verify.gradients import Floats, StepOfAll, aligned, eps_of, gradients_of, names_of, weight_of, weights_before

_ENOUGH = 8
"""So many numbers are not all short by chance."""
_ODD = 0.2
"""Smallest fraction of rounded numbers that use their last bit. About half of them do, and few small whole numbers."""
_PRECISION_STEPS = 2
"""Number of first steps to check. Rounding is the same in all steps."""

Short = tuple[int, float]
"""Trailing zero bits of a float32's mantissa, and the unit in the last place at 1 of what was rounded so."""
_UNITS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
_SHORT: tuple[Short, ...] = ((16, _UNITS["bfloat16"]), (13, _UNITS["float16"]))
"""bfloat16 and float16."""


def computed_in(trace: Trace) -> tuple[Short, ...]:
    """Return the 16-bit precisions that a run's gradients were rounded to; naturally short numbers (counts) do not count."""
    elements: Counter[Short] = Counter()
    odd: Counter[Short] = Counter()
    for name in trace.optimizers:
        for step in trace.steps(name)[:_PRECISION_STEPS]:
            for array in step[min(step)].gradients.values():
                bits = _bits(array.read())
                short = _short_in(bits, _SHORT)
                if short is not None:
                    elements[short] += bits.size
                    odd[short] += int(((bits >> np.uint32(short[0])) & 1).sum())
    return tuple(short for short in _SHORT if elements[short] >= _ENOUGH and odd[short] >= _ODD * elements[short])


def _bits(values: Array) -> Array:
    """Return the bits of the finite, nonzero float32 numbers; none for other dtypes."""
    if values.dtype != np.float32:
        return np.zeros(0, np.uint32)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    kept: Array = bits[((bits << 1) != 0) & np.isfinite(values.reshape(-1))]
    return kept


def _short_in(bits: Array, among: tuple[Short, ...]) -> Short | None:
    """Return the first precision that holds all numbers."""
    low = int(np.bitwise_or.reduce(bits)) if bits.size else 1
    return next((short for short in among if low & ((1 << short[0]) - 1) == 0), None)


def unit_of(array: StoredArray, computed: tuple[Short, ...]) -> float:
    """Return the unit in the last place at 1 of these numbers: of a precision in `computed`, or of their dtype."""
    short = _short_in(_bits(array.read()), computed) if computed else None
    return eps_of(array.dtype) if short is None else short[1]


def unit_of_all(arrays: list[StoredArray], computed: tuple[Short, ...]) -> float:
    """Return the finest unit among arrays of the same computation; usually the first one decides."""
    finest = 1.0
    for array in arrays:
        finest = min(finest, unit_of(array, computed))
        if finest <= eps_of("<f4"):
            break
    return finest if arrays else eps_of("<f4")


@dataclass(frozen=True)
class Rounding:
    """Describe how many units in the last place of its gradients' dtype a program's rounding makes (float16: 8192).

    Attributes:
        units: Of most gradients of its first step: 1 where fewer than half of their elements are of 16 bits.
        coarsest: Of the coarsest, of which it may have few: what was summed in 32 bits of what is rounded to 16 does not show.
    """

    units: float = 1.0
    coarsest: float = 1.0

    @classmethod
    def of(cls, trace: Trace) -> Rounding:
        """Return the rounding of a run: from short numbers, from 16-bit layers, and from casts of the step itself."""
        facts, computed = Facts.of(trace), computed_in(trace)
        by_layer = {name: unit for dtype, unit in _UNITS.items() for name in getattr(facts, dtype)}
        of_step = max((_UNITS[dtype] for dtype in facts.casts), default=0.0)
        elements: Counter[float] = Counter()
        for optimizer in trace.optimizers[:1]:
            for step in trace.steps(optimizer)[:1]:
                for name, array in step[min(step)].gradients.items():
                    unit = max(unit_of(array, computed), by_layer.get(name, 0.0), of_step)
                    elements[unit / eps_of(array.dtype)] += int(np.prod(array.shape))
        whole = elements.total()
        return cls(
            units=max((units for units, size in elements.items() if 2 * size >= whole), default=1.0),
            coarsest=max((1.0, *elements)),
        )


_PARALLEL = 0.99


@lru_cache(maxsize=32)
def aggregation(topology: Trace, reference: Trace, optimizer: str) -> str:
    """Return `sum` or `mean`."""
    said = stated_aggregation(topology, optimizer)
    ours, theirs = topology.steps(optimizer), reference.steps(optimizer)
    if said == "replicated":
        return "mean"
    if not ours or not theirs or len(ours[0]) < 2 or said == "sum":
        return "sum"
    steps = range(min(len(ours), len(theirs)))
    first = next((k for k in steps if any(_any(local) for local in ours[k].values())), 0)
    if _has_summed(ours[first]):
        return "mean"
    added, whole = _gradients(ours[first], theirs[first])
    moved, expected = updates(topology, reference, optimizer, first)
    if not np.dot(whole, whole) or not np.dot(added, whole):
        return "sum"
    factor = float(np.dot(added, whole) / np.dot(whole, whole))
    both, alone = float(np.dot(moved, expected)), float(np.dot(expected, expected))
    sizes = float(np.sqrt(np.dot(moved, moved) * alone))
    # Where the update tells nothing (replicas that drifted apart, an update not along the gradient): what fits the reference.
    target = both / alone if sizes and both / sizes > _PARALLEL else 1.0
    distances = {"sum": abs(np.log(abs(factor / target))), "mean": abs(np.log(abs(factor / len(ours[0]) / target)))}
    return min(distances, key=lambda how: distances[how])


def stated_aggregation(trace: Trace, optimizer: str) -> str:
    """Return what the probe saw: `replicated` (applied after `Strategy.reduce`), `skipped` (not summed), `tape`, or `sum`."""
    if any(event.get("tape") for _, event in trace.of("step") if event["optimizer"] == optimizer):
        return "tape"
    facts = (event.get("optimizers", {}).get(optimizer, {}) for _, event in trace.of("program"))
    return next((str(entry["aggregation"]) for entry in facts if entry.get("aggregation")), "sum")


def have_equal_rows(step: StepOfAll) -> bool:
    """Return whether all replicas are known to have the same rows: then their gradients are equal, summed or not."""
    rows = [local.rows for local in step.values()]
    return None not in rows and len({tuple(sorted(own or ())) for own in rows}) == 1


def _any(local: Step) -> bool:
    return any(np.any(array.read()) for array in local.gradients.values())


def _has_summed(step: StepOfAll) -> bool:
    """Return whether the program has summed before: all replicas have the same gradient bit by bit, but not the same rows."""
    if have_equal_rows(step):
        return False
    first, *others = (step[replica].gradients for replica in sorted(step))
    return all(
        other.keys() == first.keys() and all(np.array_equal(other[name].read(), first[name].read()) for name in first)
        for other in others
    )


def _gradients(ours: StepOfAll, theirs: StepOfAll) -> tuple[Floats, Floats]:
    """Return the sum of a step's local gradients and the reference's, all tensors together."""
    added, whole = [np.zeros(0)], [np.zeros(0)]
    for tensor in names_of(theirs):
        mine, other = gradients_of(ours, tensor), gradients_of(theirs, tensor)
        if mine and other:
            arrays = aligned([*mine.values(), *other.values()])
            added.append(np.sum(arrays[: len(mine)], axis=0))
            whole.append(np.sum(arrays[len(mine) :], axis=0))
    return np.concatenate(added), np.concatenate(whole)


def updates(
    topology: Trace, reference: Trace, optimizer: str, step: int, *, leaving: Collection[str] = ()
) -> tuple[Floats, Floats]:
    """Return how a step moved the weights, but those of some variables, in the topology and in the reference."""
    ours, theirs = topology.steps(optimizer)[step], reference.steps(optimizer)[step]
    moved, expected = [np.zeros(0)], [np.zeros(0)]
    for tensor in [name for name in names_of(theirs) if name not in leaving]:
        stored = [
            weight_of(ours, tensor),
            weights_before(topology, optimizer, step, tensor),
            weight_of(theirs, tensor),
            weights_before(reference, optimizer, step, tensor),
        ]
        if None not in stored:
            a, b, c, d = aligned([array for array in stored if array is not None])
            moved.append(a - b)
            expected.append(c - d)
    return np.concatenate(moved), np.concatenate(expected)


@dataclass(frozen=True)
class Runs:
    """Hold the traces of one comparison.

    Attributes:
        source: The reference with steps of its own, where `reference` is led step by step by the run that is judged.
        reported: Runs of the program itself, at the topology's weights or rounded otherwise: what it reports once in many steps
            no evaluated step shows.
    """

    reference: Trace
    topology: Trace
    noise: Sequence[Trace]
    confirmation: Sequence[Trace] = ()
    source: Trace | None = None
    reported: Sequence[Trace] = ()

    @cached_property
    def as_they_came(self) -> Runs:
        """Return the runs with the reference that led itself: for what the program starts with, reports and ends with."""
        return self if self.source is None else replace(self, reference=self.source, noise=(), confirmation=(), source=None)

    @property
    def others(self) -> list[Trace]:
        """Return the noise runs and then the confirming runs."""
        return [*self.noise, *self.confirmation]

    def pairs(self, optimizer: str) -> list[tuple[StepOfAll, StepOfAll]]:
        """Complete steps that both runs have, in order: (topology, reference)."""
        return list(zip(complete(self.topology, optimizer), complete(self.reference, optimizer), strict=False))

    @cached_property
    def computed(self) -> tuple[Short, ...]:
        """Return the 16-bit precisions that the program computes in."""
        return computed_in(self.reference)

    @cached_property
    def of_first(self) -> list[str]:
        """Return scalars that a step assigns and that have the value of the first replica."""
        return Facts.of(self.reference, self.topology).of_first

    @cached_property
    def examples(self) -> Mapping[int, int]:
        """Return the number of examples of each step, 0 where they were not seen."""
        steps = [(k, ours) for name in self.optimizers for k, (ours, _) in enumerate(self.pairs(name))]
        return {k: sum(len(local.rows or ()) for local in step.values()) for k, step in steps}

    def batches(self, optimizer: str) -> tuple[int, int]:
        """Return how many batches a step applies together, in topology and reference; 1 and 1 if that varies."""
        counts = {(_batches(ours), _batches(theirs)) for ours, theirs in self.pairs(optimizer)}
        return counts.pop() if len(counts) == 1 else (1, 1)

    def how(self, optimizer: str) -> str:
        """Return how one gradient is made of the replicas': `sum` or `mean`."""
        return aggregation(self.topology, self.reference, optimizer)

    @property
    def optimizers(self) -> list[str]:
        """Return the optimizers that both runs have."""
        return [name for name in self.reference.optimizers if name in self.topology.optimizers]


def complete(trace: Trace, optimizer: str) -> list[StepOfAll]:
    """Return an optimizer's steps without those at the end that lack replicas (a host was ended in the middle)."""
    steps: list[StepOfAll] = list(trace.steps(optimizer))
    while steps and len(steps[-1]) < len(steps[0]):
        steps.pop()
    return steps


def _batches(step: StepOfAll) -> int:
    return max(local.runs for local in step.values())


def as_many_steps(runs: Runs) -> bool:
    """Return whether both runs made equally many steps of each optimizer."""
    return all(len(complete(runs.topology, name)) == len(complete(runs.reference, name)) for name in runs.optimizers)
