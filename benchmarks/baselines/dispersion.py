"""How far the replicas of one step lie apart before the sum: their losses, the lengths of their gradients, their directions.

After "Silent Inconsistency in Data-Parallel Full Fine-Tuning" (arXiv 2602.14462), which watches these three and names no limit.
Here each is the mean over the steps. The first two are relative, so that one limit can serve programs of every scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.baselines.runs import Array, Run


def losses_apart(losses: Array, _: Array) -> float:
    """Return the standard deviation of the losses, relative to their mean."""
    return float(losses.std() / abs(losses.mean()))


def norms_apart(_: Array, gradients: Array) -> float:
    """Return the standard deviation of the norms, relative to their mean."""
    norms = np.linalg.norm(gradients, axis=1)
    return float(norms.std() / norms.mean())


def directions_apart(_: Array, gradients: Array) -> float:
    """Return 1 minus the mean cosine of two replicas' gradients."""
    units = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    number = len(units)
    return 1.0 - float((np.square(units.sum(axis=0)).sum() - number) / (number * (number - 1)))


def dispersion(apart: Callable[[Array, Array], float]) -> Callable[[Run, Run], float | None]:
    """Return the score of a run by one of the three: None where no tape was asked for like gradients on several replicas."""

    def score(several: Run, _: Run) -> float | None:
        steps = list(zip(*several.steps.values(), strict=False))
        if len(several.steps) < 2 or not steps or any(len({len(gradient) for _, gradient in step}) > 1 for step in steps):
            return None
        with np.errstate(all="ignore"):
            values = [_of_step(step, apart) for step in steps]
        return float(np.mean(np.nan_to_num(values, nan=np.inf)))

    return score


def _of_step(step: Sequence[tuple[float, Array]], apart: Callable[[Array, Array], float]) -> float:
    losses, gradients = zip(*step, strict=True)
    return apart(np.array(losses), np.stack(gradients))
