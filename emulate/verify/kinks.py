"""Tell a unit on the other side of its kink from a wrong gradient.

A ReLU, a maximum or a comparison makes rounding visible: a pre-activation of 1e-9 is positive in one run and negative in the
other, and a whole row's contribution to some gradients appears or is gone. That is no fault of the program; the noise runs show
it too, but not necessarily in the same step. It looks like this: after steps in which everything agreed to rounding, the
*gradients* of one step differ by a little. From then on the runs are disturbed, and more units fall. A bug is there from the
first step on and in each of them, or is large when it comes, or shows in the weights before the gradients. A count or an
accuracy that jumps by a row now and then, while all gradients agree, is a kink too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from emulate.verify.noise import REPORTED

if TYPE_CHECKING:
    from emulate.verify.compare import Point

SMALL = 1e-2
"""Largest relative L2 difference that a few units of one row cause in a gradient."""
FADES = 0.1
"""Fraction of the largest difference from which a later step counts as its return."""
JUMP = 0.05
"""Largest relative jump of a metric that single rows may explain."""
SELDOM = 0.25
"""Largest fraction of a metric's values that may jump."""


def kink_onset(points: Sequence[Point]) -> int | None:
    """Return the step from which on kinks may explain all differences; None if they cannot, or there are none."""
    out = _out(points)
    if not out:
        return None
    first = min(p.step for p in out)
    kinds = {p.measure.key.kind for p in out if p.step == first}
    if "gradient" in kinds:
        return first if _starts_small(out, first) and (first > 0 or not _comes_back(points)) else None
    return first if kinds == {"metric"} and _jumps_seldom(points, out) else None


def cancelled_onset(points: Sequence[Point]) -> int | None:
    """Return the step from which on weights differ although no gradient does; None if something else differs first.

    A gradient that cancels over the batch is rounding alone: an optimizer that divides by its size makes a step of it.
    """
    out = _out(points)
    if not out:
        return None
    first = min(p.step for p in out)
    return first if {p.measure.key.kind for p in out if p.step == first} == {"weight"} else None


def _out(points: Sequence[Point]) -> list[Point]:
    """Return what is beyond the noise floor; nothing if rounding cannot be the reason."""
    out = [p for p in points if p.exceeds and p.measure.key.kind != "objective"]
    return [] if any(p.measure.non_finite or (p.measure.key.kind == "initial-weight" and not p.step) for p in out) else out


def _starts_small(out: Sequence[Point], first: int) -> bool:
    return all(p.measure.relative < SMALL for p in out if p.step == first and p.measure.key.kind == "gradient")


def _comes_back(points: Sequence[Point]) -> bool:
    """Return whether most steps after the first difference have one of about the same relative size."""
    by_step: dict[int, float] = defaultdict(float)
    for p in points:
        if p.measure.key.kind == "gradient":
            by_step[p.step] = max(by_step[p.step], p.measure.relative if p.exceeds else 0.0)
    sizes = [by_step[k] for k in sorted(by_step)]
    again = [size for size in sizes if size >= FADES * max(sizes)]
    return len(again) >= max(2, len(sizes) / 2) or len(sizes) == 1


def _jumps_seldom(points: Sequence[Point], out: Sequence[Point]) -> bool:
    if any(p.measure.key.kind not in REPORTED or p.measure.relative > JUMP for p in out):
        return False
    names = {p.measure.key for p in out}
    return all(_count(out, name) <= SELDOM * _count(points, name) for name in names)


def _count(points: Sequence[Point], key: object) -> int:
    return sum(p.measure.key == key for p in points)
