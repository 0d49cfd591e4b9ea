"""Tells a unit that fell on the other side of its kink from a wrong gradient.

A ReLU, a maximum or a comparison makes rounding visible: a pre-activation of 1e-9 is positive in one run and negative
in the other, and a whole row's contribution to some gradients appears or is gone. That is no fault of the program, the
noise runs show it too, but not necessarily in the same step. It looks like this: the difference comes out of nothing in
the *gradients*, it is small, and the gradients of the steps after it differ less (only by what the disturbed weights
cause). A bug is large, or there from the first step on, or comes back in every step, or shows in the weights first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulate.verify.compare import Point

SMALL = 1e-2
"""The largest relative L2 difference that one unit of one row makes in a gradient."""
FADES = 0.1
"""A later step counts as a return of the difference from this part of the largest one on."""


def is_kink(points: Sequence[Point]) -> bool:
    """Whether everything that exceeds the noise floor could come from units on the other side of their kink."""
    out = [p for p in points if p.exceeds and p.measure.key.kind != "objective"]
    if not out or any(p.measure.non_finite or p.measure.key.kind == "initial-weight" for p in out):
        return False
    gradients = [p for p in out if p.measure.key.kind == "gradient"]
    if not gradients:
        return False
    onset = min(p.measure.step for p in gradients)
    if any(p.measure.step < onset for p in out if p.measure.key.kind == "weight"):
        return False
    return all(p.measure.relative < SMALL for p in gradients) and not _comes_back(points)


def _comes_back(points: Sequence[Point]) -> bool:
    """Whether most steps from the first difference on have one of about the same relative size."""
    by_step: dict[int, float] = defaultdict(float)
    for p in points:
        if p.measure.key.kind == "gradient":
            by_step[p.measure.step] = max(by_step[p.measure.step], p.measure.relative if p.exceeds else 0.0)
    steps = [by_step[k] for k in sorted(by_step)]
    onset = next(k for k, size in enumerate(steps) if size > 0)
    later = steps[onset:]
    again = [size for size in later if size >= FADES * max(later)]
    return len(later) >= 2 and len(again) >= max(2, len(later) / 2)
