"""Measure one tensor against the reference: the error, and the spread of the noise runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emulate.digits import told_apart
from emulate.probe.trace import Step, StoredArray
from emulate.verify.arrays import Floats, eps_of, largest, norm
from emulate.verify.compared_runs import Runs
from emulate.verify.noise import Key
from emulate.verify.precision import unit_of


@dataclass(frozen=True)
class Measure:
    """Hold one tensor in one step.

    Attributes:
        error: Largest absolute difference from the reference.
        relative: L2 norm of the difference over the L2 norm of the reference.
        spread: Largest absolute difference of the noise runs from the reference; NaN without one that has it.
        confirmed: The same of the extra noise runs with larger perturbation.
        scale: Largest absolute element of the reference and of the local gradients.
        non_finite: The topology has a NaN or an infinity where the reference has a number.
        both_non_finite: Both have one in the same place.
        compares: Both have a number somewhere in the same place.
        is_of_chance: It says nothing: the noise runs, which have the rows of a batch in another order, are about as far away as
            any other numbers would be.
        at: The training step it belongs to: `step` itself but for numbers that are reported once in many steps.
    """

    key: Key
    step: int
    error: float
    relative: float
    spread: float
    confirmed: float
    scale: float
    eps: float
    value: float | None = None
    reference_value: float | None = None
    replica: int | None = None
    host: int | None = None
    non_finite: bool = False
    both_non_finite: bool = False
    compares: bool = True
    is_of_chance: bool = False
    at: int | None = None

    @property
    def in_print(self) -> tuple[str, str]:
        """Return `value` and `reference_value` for a reader, with digits that tell them apart."""
        return told_apart(self.value, self.reference_value)


def measure(
    key: Key,
    step: int,
    ours: Floats,
    theirs: Floats,
    noise: Sequence[Floats],
    confirmation: Sequence[Floats] = (),
    *,
    eps: float,
    scale: float = 0.0,
    host: int | None = None,
) -> Measure:
    """Compare one tensor; all arrays have the same elements."""
    finite = np.isfinite(ours) & np.isfinite(theirs)
    distance = np.where(finite, np.abs(np.where(finite, ours, 0.0) - np.where(finite, theirs, 0.0)), 0.0)
    lost = ~np.isfinite(ours) & np.isfinite(theirs)
    at = int(np.argmax(lost)) if lost.any() else (int(np.argmax(distance)) if distance.size else -1)
    size = norm(np.where(np.isfinite(theirs), theirs, 0.0))
    return Measure(
        key=key,
        step=step,
        error=float(distance.max()) if distance.size else 0.0,
        relative=norm(distance) / size if size else (float("inf") if distance.any() else 0.0),
        spread=max((_distance(array, theirs) for array in noise), default=math.nan),
        confirmed=max((_distance(array, theirs) for array in confirmation), default=0.0),
        scale=max(scale, largest(theirs)),
        eps=eps,
        value=float(ours[at]) if at >= 0 else None,
        reference_value=float(theirs[at]) if at >= 0 else None,
        host=host,
        non_finite=bool(lost.any()),
        both_non_finite=bool((~np.isfinite(ours) & ~np.isfinite(theirs)).any()),
        compares=bool(finite.any()) or not finite.size,
    )


def _distance(one: Floats, other: Floats) -> float:
    """Return the largest difference of finite elements: a loss scale may make both gradients infinite."""
    if one.shape != other.shape:
        return 0.0
    with np.errstate(invalid="ignore"):
        return largest(one - other)


def coarsest_unit(runs: Runs, step: Mapping[int, Step]) -> float:
    """Return the coarsest unit of a step's gradients."""
    return max((unit_of(a, runs.computed) for local in step.values() for a in local.gradients.values()), default=eps_of("<f4"))


def same_shape(arrays: list[StoredArray]) -> bool:
    """Return whether arrays can be compared element by element."""
    return len({array.shape for array in arrays}) == 1
