"""In what precision gradients were computed: mixed precision stores float32 what it rounded to 16 bits.

Permuting the rows of a 16-bit program shows little: sums are accumulated in 32 bits and rounded once, and the order of the
rows seldom changes how. On several replicas each partial sum is rounded by itself. So the unit in the last place that
counts is that of the computation, and the noise runs must be disturbed by that much.
"""

from __future__ import annotations

import numpy as np

from emulate.probe.trace import Array, StoredArray, Trace
from emulate.verify.arrays import eps_of

_ENOUGH = 8
"""So many numbers are not all short by chance."""
_SHORT = ((16, 2.0**-7), (13, 2.0**-10))
"""Trailing zero bits of a float32's mantissa, and the unit in the last place at 1 of what was rounded so: bfloat16, float16."""


def unit_of(values: Array) -> float:
    """The unit in the last place at 1 of the precision that these numbers were rounded to."""
    if values.dtype != np.float32:
        return eps_of(values.dtype.str)
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    bits = bits[(bits << 1) != 0]
    if bits.size < _ENOUGH:
        return eps_of("<f4")
    low = int(np.bitwise_or.reduce(bits))
    return next((unit for zeros, unit in _SHORT if low & ((1 << zeros) - 1) == 0), eps_of("<f4"))


def unit_of_all(arrays: list[StoredArray]) -> float:
    """The finest unit among arrays that were computed alike; most often the first one settles it."""
    finest = 1.0
    for array in arrays:
        finest = min(finest, unit_of(array.read()))
        if finest <= eps_of("<f4"):
            break
    return finest if arrays else eps_of("<f4")


def rounding_units(trace: Trace) -> float:
    """How many units in the last place of its gradients' dtype a program's rounding makes: 1, or 8192 in float16.

    A program computes in 16 bits when at least half of its first step's gradient elements have no more.
    """
    short: dict[float, int] = {}
    whole = 0
    for name in trace.optimizers[:1]:
        for step in trace.steps(name)[:1]:
            for array in step[min(step)].gradients.values():
                size = int(np.prod(array.shape))
                ratio = unit_of(array.read()) / eps_of(array.dtype)
                short[ratio] = short.get(ratio, 0) + size
                whole += size
    return max((ratio for ratio, size in short.items() if 2 * size >= whole), default=1.0)
