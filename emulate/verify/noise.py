"""Compute the noise floor: how far two runs may differ by rounding alone.

Floating point sums depend on their order, so a correct program on four replicas does not give the bits of one device. How far
apart is still right is *measured*: the reference makes its steps again with the rows of each batch permuted and each gradient
changed by one unit in the last place - mathematically the same training, rounded differently. What these runs differ by, per
tensor and step, is the floor. It only grows over the steps, since what was disturbed once stays disturbed; but where the
reference follows the run that is judged (fallbacks.py), gradients, losses and metrics are those of their step alone. Three runs
see a tensor of a few elements too seldom (three zeros happen), so the floor is never less than

- 8 units in the last place of the tensor's scale: the largest element so far, local gradients included, because a
  gradient that cancels to nothing over the batch is as noisy as its summands;
- the median relative floor of all tensors of its kind in the same step, at its own scale (for losses and metrics also that
  of the gradients, as far as it is not many times what losses are seen to spread: a deep network amplifies rounding in its
  gradients far more than in its loss).

Runs that are evaluated take gradients, and what a step returns, at weights that are off by units in the last place, so that the
forward pass is rounded, too. Where the program itself is run again, these runs have the reference's weights to the bit in the
first step, and each row its bits wherever it stands: what another forward pass makes of a gradient that cancels within rows
shows from the second step on (`compare`).

A difference counts from `FACTOR` times the floor on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FACTOR = 10.0
UNITS = 8.0
SEEN = 3.0
"""Factor on the spread of three runs that rounding may cause in a single number."""


@dataclass(frozen=True, order=True)
class Key:
    """Identify what is followed over the steps: one tensor of one optimizer, or one reported number."""

    kind: str
    optimizer: str
    tensor: str


BySteps = Mapping[int, float]
REPORTED = ("loss", "metric")
_OF_A_STEP = ("gradient", "objective", *REPORTED)


def floors(
    spreads: Mapping[Key, BySteps], scales: Mapping[Key, BySteps], eps: Mapping[Key, float], *, lockstep: bool = False
) -> dict[Key, dict[int, float]]:
    """Return the noise floor of each tensor by step.

    Args:
        spreads: For each tensor and step how far the noise runs are from the reference (largest absolute difference); NaN
            where none has it.
        scales: For each tensor and step its largest absolute element.
        eps: The unit in the last place at 1 of each tensor's dtype.
        lockstep: Whether the runs have the same weights in each step.

    Returns:
        For each tensor and step what rounding alone may make of it, in the tensor's unit.
    """
    spread, scale = (
        {key: _of_each(values) if lockstep and key.kind in _OF_A_STEP else _running(values) for key, values in by_key.items()}
        for by_key in (spreads, scales)
    )
    measured = {key for key, values in spreads.items() if any(not np.isnan(value) for value in values.values())}
    pool = _Pool({key: values for key, values in spread.items() if key in measured}, scale)
    return {
        key: {k: max(spread[key][k], max(UNITS * eps[key], pool.at(key.kind, k)) * scale[key][k]) for k in spread[key]}
        for key in spread
    }


class _Pool:
    """Hold, for each kind and step, the median over tensors of the relative spread."""

    def __init__(self, spread: Mapping[Key, BySteps], scale: Mapping[Key, BySteps]) -> None:
        relative: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for key, values in spread.items():
            for k, value in values.items():
                if scale[key][k] > 0:
                    relative[key.kind][k].append(value / scale[key][k])
        self._medians = {
            kind: {k: float(np.median(values)) for k, values in sorted(steps.items())} for kind, steps in relative.items()
        }

    def at(self, kind: str, step: int) -> float:
        own = self._medians.get(kind, {}).get(step, 0.0)
        if kind == "final-weight":
            return max(own, self._latest("weight", step))
        if kind not in REPORTED:
            return own
        gradients = self._latest("gradient", step)
        if "loss" not in self._medians:
            return max(own, gradients)
        return max(own, min(gradients, SEEN * max(own, self._latest("loss", step))))

    def _latest(self, kind: str, step: int) -> float:
        return max((value for k, value in self._medians.get(kind, {}).items() if k <= step), default=0.0)


def _of_each(values: BySteps) -> dict[int, float]:
    """Return the values, with 0 in place of those that are not finite."""
    return {step: value if np.isfinite(value) else 0.0 for step, value in values.items()}


def _running(values: BySteps) -> dict[int, float]:
    """Return the running maximum by step, with 0 in place of values that are not finite."""
    largest, running = 0.0, {}
    for step, value in sorted(values.items()):
        largest = max(largest, value if np.isfinite(value) else 0.0)
        running[step] = largest
    return running
