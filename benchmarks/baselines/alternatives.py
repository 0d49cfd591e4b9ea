"""The alternatives: each gives a run on several devices, beside one on one device, a score, high where something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.baselines.dispersion import directions_apart, dispersion, losses_apart, norms_apart
from benchmarks.baselines.runs import ONE_STEP, WATCHED, Run

Score = Callable[[Run, Run], float | None]
D3 = "D3 ([IEEE TSE 2025](https://doi.org/10.1109/TSE.2024.3461657))"
SILENT = "[arXiv 2602.14462](https://arxiv.org/abs/2602.14462)"


@dataclass(frozen=True)
class Alternative:
    """One way in which people check a distributed program.

    Attributes:
        name: In the table.
        origin: Who does it so.
        measure: What the score is, in words; alternatives that differ by their limit alone have the same.
        score: Of a run on several devices beside that on one; None where the check cannot be asked.
        limit: A higher score accuses the program. None: who does it so names no limit, and the best one is taken.
        script: What runs before the program.
    """

    name: str
    origin: str
    measure: str
    score: Score
    limit: float | None
    script: str = WATCHED


def last_loss(several: Run, one: Run) -> float | None:
    """Return the difference of the last losses that are printed, relative to one device's."""
    if several.loss is None or one.loss is None:
        return None
    return _largest(np.array([several.loss]), np.array([one.loss]), 0.0)


def weights(atol: float = 0.0) -> Score:
    """Return a score: the smallest rtol with which `np.testing.assert_allclose` accepts all final weights, at this atol."""

    def score(several: Run, one: Run) -> float:
        shapes = [[array.shape for array in run.weights] for run in (several, one)]
        if shapes[0] != shapes[1]:
            return math.inf
        return max((_largest(a, b, atol) for a, b in zip(several.weights, one.weights, strict=True)), default=0.0)

    return score


def _largest(value: np.ndarray, reference: np.ndarray, atol: float) -> float:
    """Return the largest difference beyond atol, relative to the reference; infinity where one alone is not a number."""
    if not value.size:
        return 0.0
    with np.errstate(all="ignore"):
        relative = np.maximum(np.abs(value - reference) - atol, 0.0) / np.abs(reference)
    same = (np.abs(value - reference) <= atol) | (np.isnan(value) & np.isnan(reference))
    return float(np.where(same, 0.0, np.nan_to_num(relative, nan=np.inf)).max())


def copies_differ(several: Run, _: Run) -> float:
    """Return 1 where the copies of the weights are not the same on all replicas and hosts, bit for bit, else 0."""
    first, *others = several.copies.values() or [[]]
    differ = any(
        len(copy) != len(first) or not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(copy, first, strict=False))
        for copy in others
    )
    return float(differ)


def after_one_step(several: Run, one: Run) -> float | None:
    """Return the score of the weights after one step of descent; None where no optimizer made it."""
    return weights(5e-4)(several, one) if one.has_optimizer else None


ALTERNATIVES = (
    Alternative("last loss within 1 %", "what papers report", "last loss", last_loss, 0.01),
    *(
        Alternative(f"weights, rtol={rtol:g}", "tests of training libraries", "final weights", weights(), rtol)
        for rtol in (1e-3, 1e-5, 1e-7)
    ),
    Alternative(
        "weights, rtol=1e-3, atol=1e-3", "TensorFlow's tests of strategies", "final weights, atol=1e-3", weights(1e-3), 1e-3
    ),
    Alternative("replicas have equal weights", "Megatron-LM's check of hashes", "copies", copies_differ, 0.0),
    Alternative("one step of SGD", D3, "weights after one step, atol=5e-4", after_one_step, 1e-4, ONE_STEP),
    Alternative("replicas' losses apart", SILENT, "losses apart", dispersion(losses_apart), None),
    Alternative("replicas' gradient norms apart", SILENT, "norms apart", dispersion(norms_apart), None),
    Alternative("replicas' gradients point apart", SILENT, "directions apart", dispersion(directions_apart), None),
)
