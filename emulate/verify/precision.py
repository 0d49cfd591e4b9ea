"""In what precision gradients were computed: mixed precision stores float32 what it rounded to 16 bits.

Permuting the rows of a 16-bit program shows little: sums are accumulated in 32 bits and rounded once, and the order of the
rows seldom changes how. On several replicas each partial sum is rounded by itself. So the unit in the last place that
counts is that of the computation, and the noise runs must be disturbed by that much.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from emulate.probe.trace import Array, StoredArray, Trace
from emulate.verify.arrays import eps_of

_ENOUGH = 8
"""So many numbers are not all short by chance."""
_ODD = 0.2
"""Of numbers that were rounded every second one uses its last bit; of small whole numbers, which are short too, few do."""
_STEPS = 2
"""The first steps are looked at: rounding is the same in all."""

Short = tuple[int, float]
"""Trailing zero bits of a float32's mantissa, and the unit in the last place at 1 of what was rounded so."""
_SHORT: tuple[Short, ...] = ((16, 2.0**-7), (13, 2.0**-10))
"""bfloat16 and float16."""


def computed_in(trace: Trace) -> tuple[Short, ...]:
    """The 16-bit precisions that a run's gradients were rounded to; numbers that are short by nature (counts) do not count."""
    seen: Counter[Short] = Counter()
    odd: Counter[Short] = Counter()
    for name in trace.optimizers:
        for step in trace.steps(name)[:_STEPS]:
            for array in step[min(step)].gradients.values():
                bits = _bits(array.read())
                short = _short(bits, _SHORT)
                if short is not None:
                    seen[short] += bits.size
                    odd[short] += int(((bits >> np.uint32(short[0])) & 1).sum())
    return tuple(one for one in _SHORT if seen[one] >= _ENOUGH and odd[one] >= _ODD * seen[one])


def _bits(values: Array) -> Array:
    """The bits of the float32 numbers that are finite and not zero; none of any other dtype."""
    if values.dtype != np.float32:
        return np.zeros(0, np.uint32)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    kept: Array = bits[((bits << 1) != 0) & np.isfinite(values.reshape(-1))]
    return kept


def _short(bits: Array, among: tuple[Short, ...]) -> Short | None:
    """The first precision that all numbers have no more than."""
    low = int(np.bitwise_or.reduce(bits)) if bits.size else 1
    return next((one for one in among if low & ((1 << one[0]) - 1) == 0), None)


def unit_of(array: StoredArray, computed: tuple[Short, ...]) -> float:
    """The unit in the last place at 1 of what these numbers were rounded to: a precision `computed` in, or their dtype."""
    short = _short(_bits(array.read()), computed) if computed else None
    return eps_of(array.dtype) if short is None else short[1]


def unit_of_all(arrays: list[StoredArray], computed: tuple[Short, ...]) -> float:
    """The finest unit among arrays that were computed alike; most often the first one settles it."""
    finest = 1.0
    for array in arrays:
        finest = min(finest, unit_of(array, computed))
        if finest <= eps_of("<f4"):
            break
    return finest if arrays else eps_of("<f4")


def rounding_units(trace: Trace) -> float:
    """How many units in the last place of its gradients' dtype a program's rounding makes: 1, or 8192 in float16.

    A program computes in 16 bits when at least half of its first step's gradient elements have no more.
    """
    computed = computed_in(trace)
    short: dict[float, int] = {}
    whole = 0
    for name in trace.optimizers[:1]:
        for step in trace.steps(name)[:1]:
            for array in step[min(step)].gradients.values():
                size = int(np.prod(array.shape))
                ratio = unit_of(array, computed) / eps_of(array.dtype)
                short[ratio] = short.get(ratio, 0) + size
                whole += size
    return max((ratio for ratio, size in short.items() if 2 * size >= whole), default=1.0)
