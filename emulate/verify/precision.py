"""Determine in what precision gradients were computed: mixed precision stores in float32 what it rounded to 16 bits.

Permuting the rows of a 16-bit program shows little: sums are accumulated in 32 bits and rounded once, and the order of the rows
seldom changes how. On several replicas each partial sum is rounded by itself. So the unit in the last place that counts is that
of the computation, and the noise runs must be disturbed by that much.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from emulate.probe.facts import Facts
from emulate.probe.trace import Array, StoredArray, Trace
from emulate.verify.arrays import eps_of

_ENOUGH = 8
"""So many numbers are not all short by chance."""
_ODD = 0.2
"""Smallest fraction of rounded numbers that use their last bit. About half of them do, and few small whole numbers."""
_STEPS = 2
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
        for step in trace.steps(name)[:_STEPS]:
            for array in step[min(step)].gradients.values():
                bits = _bits(array.read())
                short = _short(bits, _SHORT)
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


def _short(bits: Array, among: tuple[Short, ...]) -> Short | None:
    """Return the first precision that holds all numbers."""
    low = int(np.bitwise_or.reduce(bits)) if bits.size else 1
    return next((short for short in among if low & ((1 << short[0]) - 1) == 0), None)


def unit_of(array: StoredArray, computed: tuple[Short, ...]) -> float:
    """Return the unit in the last place at 1 of these numbers: of a precision in `computed`, or of their dtype."""
    short = _short(_bits(array.read()), computed) if computed else None
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
