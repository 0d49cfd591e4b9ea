"""The alternatives: each is asked of a run on several devices and one on one device whether the program is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.baselines.runs import Run


@dataclass(frozen=True)
class Alternative:
    """One way in which people check a distributed program.

    Attributes:
        name: In the table.
        origin: Who does it so.
        accuses: Whether it says of a run, beside that on one device, that something is wrong.
    """

    name: str
    origin: str
    accuses: Callable[[Run, Run], bool]


def loss_differs(tolerance: float) -> Callable[[Run, Run], bool]:
    """Return a check that the last losses that are printed are as close as that, relative to one device's."""

    def accuses(several: Run, one: Run) -> bool:
        if several.loss is None or one.loss is None:
            return False
        if math.isnan(several.loss) or math.isnan(one.loss):
            return math.isnan(several.loss) != math.isnan(one.loss)
        return abs(several.loss - one.loss) > tolerance * abs(one.loss)

    return accuses


def weights_differ(rtol: float, atol: float = 0.0) -> Callable[[Run, Run], bool]:
    """Return a check that all final weights are close, element by element, as `np.testing.assert_allclose` has it."""

    def accuses(several: Run, one: Run) -> bool:
        if len(several.weights) != len(one.weights):
            return True
        pairs = zip(several.weights, one.weights, strict=True)
        return not all(a.shape == b.shape and np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True) for a, b in pairs)

    return accuses


def replicas_differ(several: Run, _: Run) -> bool:
    """Return whether the copies of the weights are not the same on all replicas and hosts, bit for bit."""
    first, *others = several.copies.values() or [[]]
    return any(
        len(copy) != len(first) or not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(copy, first, strict=False))
        for copy in others
    )


THRESHOLDS = tuple(10.0**-exponent for exponent in range(1, 9))
"""Tried for the best one."""

ALTERNATIVES = (
    Alternative("the last loss within 1 %", "what papers report", loss_differs(0.01)),
    *(
        Alternative(f"final weights, `assert_allclose` with rtol={rtol:g}", "tests of training libraries", weights_differ(rtol))
        for rtol in (1e-3, 1e-5, 1e-7)
    ),
    Alternative("final weights within rtol=1e-3 and atol=1e-3", "TensorFlow's tests of strategies", weights_differ(1e-3, 1e-3)),
    Alternative("replicas have equal weights", "Megatron-LM's check of hashes", replicas_differ),
)
