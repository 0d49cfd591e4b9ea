"""Detect BatchNormalization with the statistics of one replica's examples."""

from __future__ import annotations

import numpy as np

from emulate.probe import CENTERED, SYNCHRONIZED
from emulate.verify.case import BY_SHARE, Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.compare import Comparison, Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import weight_of
from emulate.verify.lines import made

_ALIKE = {
    BY_SHARE: "on one device that normalizes each replica's examples by themselves",
    SYNCHRONIZED: "with all BatchNormalization synchronized in both runs",
    CENTERED: "with the mean taken off the inputs of BatchNormalization in both runs",
}


def _search(case: Case) -> Sign | None:
    if not case.facts.batchnorm or case.num_replicas < 2 or not case.base.exceeding:
        return None
    statistics = [p for p in case.base.exceeding if p.measure.key.tensor in case.facts.batchnorm]
    normalized = case.normalized_alike()
    if normalized is not None:
        switch, again = normalized
        first, gone = case.base.exceeding[0], again.is_equivalent_but_for_kinks
        case.rebase(again, switch)
        case.notes.append(f"gradients, weights and losses were compared {_ALIKE[switch]}")
        return _sign(statistics, _with_switch(first, again, _ALIKE[switch], gone)) if gone or statistics else None
    if not statistics:
        return None
    case.cut(min(p.step for p in statistics), "BatchNormalization affects them, and gpudist could not synchronize it")
    return _sign(statistics, "")


def _with_switch(first: Point, again: Comparison, alike: str, gone: bool) -> str:
    m = first.measure
    before = f"{m.key.tensor} ({m.key.kind}) differs first, in step {first.step}, by {first.ratio:.0f}x the noise floor"
    if gone:
        return f"{before}; {alike} everything agrees"
    left = again.exceeding[0]
    return f"{before}; {alike} {left.measure.key.tensor} still differs from step {left.step} on"


def _sign(statistics: list[Point], switched: str) -> Sign:
    numbers = [switched]
    if statistics:
        m = statistics[0].measure
        numbers.insert(0, f"{m.key.tensor} differs from step {m.step} on ({m.in_print[0]}, {m.in_print[1]} on one device)")
    return Sign(
        "BatchNormalization uses the mean and variance of each replica's own examples, not of the whole batch.",
        "; ".join(part for part in numbers if part),
    )


_MADE = made("loss", "BatchNormalization")
BATCHNORM = Cause("batchnorm-local-statistics", _search, by_design=True, blame=(_MADE,))


def _search_cancelled(case: Case) -> Sign | None:
    """Check whether the rounding of synchronized statistics makes the difference: in each step, at the weights of this run."""
    if not case.base.exceeding or case.facts.batchnorm or not _cancels(case) or not _MADE.find(case):
        return None
    first, again = case.base.exceeding[0], case.switched(CENTERED)
    if again is None or not again.is_equivalent_but_for_kinks:
        return None
    case.rebase(again, CENTERED)
    return Sign(f"{_CANCELLED}.", _with_switch(first, again, _ALIKE[CENTERED], True), _CANCELLED)


def _cancels(case: Case) -> bool:
    """Return whether the mean of a layer's input is so large that E(x^2) - E(x)^2 keeps few digits."""
    for step in (step for name in case.topology.optimizers for step in complete(case.topology, name)[-1:]):
        for name in next(iter(step.values())).weights:
            mean, variance = (weight_of(step, name.replace("moving_mean", kind)) for kind in ("moving_mean", "moving_variance"))
            if name.endswith("moving_mean") and mean is not None and variance is not None:
                ratio = mean.read() ** 2 / np.maximum(np.abs(variance.read()), np.finfo(np.float32).tiny)
                if np.finfo(np.float32).eps * float(np.max(ratio)) > _FEW_DIGITS:
                    return True
    return False


_FEW_DIGITS = 1e-4
"""From this relative rounding error of a variance on, four of its seven digits are left."""
_CANCELLED = "Keras computes the variance of synchronized BatchNormalization as E(x^2) - E(x)^2, which cancels for a large mean"
BATCHNORM_CANCELLED = Cause("framework-limit", _search_cancelled, blame=(_MADE,))
