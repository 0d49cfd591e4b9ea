"""Detect BatchNormalization by each replica's statistics, and what becomes NaN, by a replica without examples say."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from emulate.recorder import CENTERED, SYNCHRONIZED
from emulate.told import told
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, numbers
from emulate.verify.compare import Comparison, Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import gradients_of, weight_of, weights_before
from emulate.verify.lines import made, operations
from emulate.verify.run_spec import BY_SHARE

_ALIKE = {
    BY_SHARE: "on one device that normalizes each replica's examples by themselves",
    SYNCHRONIZED: "with all BatchNormalization synchronized in both runs",
    CENTERED: "with the mean taken off the inputs of BatchNormalization in both runs",
}


def _search_batchnorm(case: Case) -> Sign | None:
    if not case.facts.batchnorm or case.num_replicas < 2 or not case.base.exceeding or any(map(case.without, _ALIKE)):
        return None
    statistics = [p for p in case.base.exceeding if p.measure.key.tensor in case.facts.batchnorm]
    normalized = case.normalize_alike()
    if normalized is None:
        why = "BatchNormalization affects them, and gpudist could not synchronize it"
        cut = Sign(then=lambda: case.cut(min(p.step for p in statistics), why))
        return _of_statistics(case, statistics, "", cut) if statistics else None
    switch, again = normalized
    note = told("normalized-alike")(f"gradients, weights and losses were compared {_ALIKE[switch]}")
    rebased = Sign(then=lambda: case.rebase(again, switch, note))
    if not (again.is_equivalent or statistics):
        return rebased
    how = _with_switch(case.base.exceeding[0], again, _ALIKE[switch], again.is_equivalent)
    return _of_statistics(case, statistics, how, rebased)


def _with_switch(first: Point, again: Comparison, alike: str, gone: bool) -> str:
    m = first.measure
    before = f"{m.key.tensor} ({m.key.kind}) differs first, in step {first.step}, by {first.ratio:.0f}x the noise floor"
    if gone:
        return f"{before}; {alike} everything agrees"
    left = again.exceeding[0]
    return f"{before}; {alike} {left.measure.key.tensor} still differs from step {left.step} on"


def _of_statistics(case: Case, statistics: list[Point], switched: str, unnamed: Sign) -> Sign:
    numbers = [switched]
    if statistics:
        m = statistics[0].measure
        numbers.insert(0, f"{m.key.tensor} differs from step {m.step} on ({m.in_print[0]}, {m.in_print[1]} on one device)")
    return replace(
        unnamed,
        summary="BatchNormalization uses the mean and variance of each replica's own examples, not of the whole batch.",
        evidence="; ".join(part for part in numbers if part),
        fix=_OF_MASKS if case.facts.masked else None,
    )


_OF_MASKS = "If the input of the layer has a mask"
_MADE = made("loss", "BatchNormalization")
BATCHNORM = Cause("batchnorm-local-statistics", _search_batchnorm, by_design=True, blame=(_MADE,))


def _search_cancelled(case: Case) -> Sign | None:
    """Check whether the rounding of synchronized statistics makes the difference: in each step, at the weights of this run."""
    if not case.base.exceeding or case.facts.batchnorm or not _cancels(case) or not _MADE.find(case.lines):
        return None
    first, again = case.base.exceeding[0], case.switch(CENTERED)
    if again is None or not again.is_equivalent:
        return None
    how = _with_switch(first, again, _ALIKE[CENTERED], True)
    return Sign(f"{_CANCELLED}.", how, _CANCELLED, then=lambda: case.rebase(again, CENTERED))


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


def _search_empty(case: Case) -> Sign | None:
    lost = _first_lost(case)
    if lost is None:
        return None
    without = [replica for replica, count in enumerate(lost.rows or ()) if count == 0]
    where, fix = f"step {lost.point.step}", None
    if not without and lost.point.measure.key.kind in _REPORTED and not lost.whose:  # and no gradient of that step
        runs = case.base.runs.topology.of("evaluation")
        without = sorted({int(event["replica"]) for _, event in runs if not event["rows"]})
        where, fix = "an evaluation", _OF_EVALUATION
    if not without or (lost.whose and not set(without) & set(lost.whose)):
        return None
    who = f"replica {without[0]} has" if len(without) == 1 else f"replicas {numbers(without)} have"
    summary = f"In {where} {who} no examples. Dividing by zero examples gives NaN: {lost.what}"
    return Sign(summary, lost.evidence, fix, then=lambda: lost.cut(case))


def _search_nan(case: Case) -> Sign | None:
    lost = _first_lost(case)
    if lost is None:
        return None
    if _is_skipped(case, lost.point):
        return _of_skipped(case, lost)
    scales = any(about.get("loss_scale") for about in case.facts.optimizers.values())
    is_unseen = scales and lost.whose and 0 not in lost.whose
    why = " Keras's LossScaleOptimizer skips a step only if the first replica's gradients are not finite." if is_unseen else ""
    summary, fix = lost.what[0].upper() + lost.what[1:] + why, _OF_LOSS_SCALE if is_unseen else None
    return Sign(summary, lost.evidence, fix, then=lambda: lost.cut(case))


def _is_skipped(case: Case, point: Point) -> bool:
    """Return whether an optimizer that scales its loss has left the weights as they were in the step of a lost gradient."""
    key, runs = point.measure.key, case.base.runs
    if key.kind != "gradient" or not case.facts.optimizers.get(key.optimizer, {}).get("loss_scale"):
        return False
    trace = runs.topology if _is_here(point) else runs.as_they_came.reference
    after = weight_of(complete(trace, key.optimizer)[point.step], key.tensor)
    before = weights_before(trace, key.optimizer, point.step, key.tensor)
    return after is not None and before is not None and np.array_equal(after.read(), before.read())


def _of_skipped(case: Case, lost: _Lost) -> Sign:
    """Leave skipped steps out, and where each run has weights of its own all that comes later."""
    step = lost.point.step

    def leave_out() -> None:
        if case.base.runs.reference.follows:
            case.explain(lambda point: point.measure.non_finite and _is_skipped(case, point))
        else:
            case.cut(step, "one of the runs skips this step")

    where, other = ("here", "on one device") if _is_here(lost.point) else ("on one device", "here")
    return Sign(
        f"Some scaled gradients of step {step} overflow {where}, and not {other}. The LossScaleOptimizer skips the step and "
        "halves its scale, as it is made for.",
        f"{lost.evidence}; the weights stay as they were before the step",
        _OF_SKIPPED,
        advice=True,
        then=leave_out,
    )


def _is_here(point: Point) -> bool:
    """Return whether the topology has lost it, and not one device."""
    return point.measure.value is not None and not math.isfinite(point.measure.value)


@dataclass(frozen=True)
class _Lost:
    """Hold the first number that is not finite, the replicas with such a local gradient, and the replicas' batch sizes."""

    point: Point
    whose: list[int]
    rows: list[int] | None

    @property
    def what(self) -> str:
        m, here = self.point.measure, _is_here(self.point)
        value, on, other = (m.value, "", "on one device") if here else (m.reference_value, " on one device", "here")
        return f"{m.key.kind} {m.key.tensor} becomes {value}{on} in step {self.point.step}; {other} it stays finite."

    @property
    def evidence(self) -> str:
        m = self.point.measure
        text = f"{m.key.tensor}: {m.value}, {m.in_print[1]} on one device, in step {self.point.step}"
        if self.whose:
            text += f"; the gradient is not finite on replica {numbers(self.whose)}"
        if self.rows is not None and (self.whose or 0 in self.rows):
            text += f"; examples per replica in this step: {numbers(self.rows)}"
        return text

    def cut(self, case: Case) -> None:
        """Limit the comparison to what comes before; for a report alone, to everything except such reports."""
        if self.point.measure.key.kind in _REPORTED and not any(
            p.measure.non_finite for p in case.base.exceeding if p.measure.key.kind not in _REPORTED
        ):
            case.explain(lambda point: point.measure.non_finite)
        else:
            case.cut(self.point.step, "values are not finite")


def _first_lost(case: Case) -> _Lost | None:
    first = next((point for point in case.left() if point.measure.non_finite), None)
    return None if first is None else _Lost(first, *_whose_is_lost(case, first))


def _whose_is_lost(case: Case, point: Point) -> tuple[list[int], list[int] | None]:
    """Return the replicas whose local gradient is not finite, and the replicas' batch sizes."""
    names = [point.measure.key.optimizer] if point.measure.key.optimizer else case.base.runs.optimizers
    for optimizer in names:
        steps = complete(case.base.runs.topology, optimizer)
        if point.step >= len(steps):
            continue
        step = steps[point.step]
        whose = sorted({r for t in step[min(step)].gradients for r, a in gradients_of(step, t).items() if not a.is_finite})
        counts = [local.rows for _, local in sorted(step.items())]
        return whose, [len(rows) for rows in counts if rows is not None] if None not in counts else None
    return [], None


_REPORTED = ("loss", "metric")
_OF_LOSS_SCALE = "With a LossScaleOptimizer"
_OF_SKIPPED = "If a LossScaleOptimizer skips a step"
_OF_EVALUATION = "In an evaluation"

EMPTY_SHARD = Cause(
    "empty-shard", _search_empty, blame=(operations("loss", "mean", "ratio", "scale"), made("examples", "batch"))
)

NAN = Cause("nan", _search_nan, unless=("empty-shard",), blame=(operations("loss", "count", "ratio", "mean", "scale"),))
