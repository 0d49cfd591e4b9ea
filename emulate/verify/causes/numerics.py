"""Detect NaN and infinity that only several devices produce."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, numbers
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import gradients_of
from emulate.verify.lines import made, operations


def _search_empty(case: Case) -> Sign | None:
    lost = _lost(case)
    if lost is None:
        return None
    without = [replica for replica, count in enumerate(lost.rows or ()) if count == 0]
    where, fix = f"step {lost.point.step}", None
    if not without and lost.is_reported_alone:
        runs = case.base.runs.topology.of("evaluation")
        without = sorted({int(event["replica"]) for _, event in runs if not event["rows"]})
        where, fix = "an evaluation", _OF_EVALUATION
    if not without or (lost.whose and not set(without) & set(lost.whose)):
        return None
    lost.cut(case)
    who = f"replica {without[0]} has" if len(without) == 1 else f"replicas {numbers(without)} have"
    return Sign(f"In {where} {who} no examples. Dividing by zero examples gives NaN: {lost.what}", lost.evidence, fix)


def _search_nan(case: Case) -> Sign | None:
    lost = _lost(case)
    if lost is None:
        return None
    lost.cut(case)
    scales = any(about.get("loss_scale") for about in case.facts.optimizers.values())
    is_unseen = scales and lost.whose and 0 not in lost.whose
    why = " Keras's LossScaleOptimizer skips a step only if the first replica's gradients are not finite." if is_unseen else ""
    return Sign(lost.what[0].upper() + lost.what[1:] + why, lost.evidence, _OF_LOSS_SCALE if is_unseen else None)


@dataclass(frozen=True)
class _Lost:
    """Hold the first number that is not finite, the replicas with such a local gradient, and the replicas' batch sizes."""

    point: Point
    whose: list[int]
    rows: list[int] | None

    @property
    def is_reported_alone(self) -> bool:
        """Return whether only a reported number is not finite, and no gradient of that step."""
        return self.point.measure.key.kind in _REPORTED and not self.whose

    @property
    def what(self) -> str:
        m = self.point.measure
        return f"{m.key.kind} {m.key.tensor} becomes {m.value} in step {self.point.step}; on one device it stays finite."

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


def _lost(case: Case) -> _Lost | None:
    first = next((point for point in case.left() if point.measure.non_finite), None)
    return None if first is None else _Lost(first, *_whose(case, first))


def _whose(case: Case, point: Point) -> tuple[list[int], list[int] | None]:
    """Return the replicas whose local gradient is not finite, and the replicas' batch sizes."""
    names = [point.measure.key.optimizer] if point.measure.key.optimizer else case.base.runs.optimizers
    for optimizer in names:
        steps = complete(case.base.runs.topology, optimizer)
        if point.step >= len(steps):
            continue
        step = steps[point.step]
        whose = sorted(
            {r for t in step[min(step)].gradients for r, a in gradients_of(step, t).items() if not np.isfinite(a.norm)}
        )
        counts = [local.rows for _, local in sorted(step.items())]
        return whose, [len(rows) for rows in counts if rows is not None] if None not in counts else None
    return [], None


_REPORTED = ("loss", "metric")
_OF_LOSS_SCALE = "With a LossScaleOptimizer"
_OF_EVALUATION = "In an evaluation"

EMPTY_SHARD = Cause(
    "empty-shard", _search_empty, blame=(operations("loss", "mean", "ratio", "scale"), made("examples", "batch"))
)

NAN = Cause("nan", _search_nan, blame=(operations("loss", "count", "ratio", "mean", "scale"),))
