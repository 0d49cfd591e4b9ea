"""NaN and infinity that only several devices produce."""

from __future__ import annotations

import numpy as np

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, numbers
from emulate.verify.compare import Point
from emulate.verify.gradients import gradients_of
from emulate.verify.measure import complete


def _search(case: Case) -> Sign | None:
    first = next((point for point in case.base.exceeding if point.measure.non_finite), None)
    if first is None:
        return None
    m = first.measure
    whose, rows = _whose(case, first)
    trained = any(p.measure.non_finite for p in case.base.exceeding if p.measure.key.kind in _TRAINED)
    case.cut(first.step, "values are not finite", at=() if trained else _TRAINED)
    summary = f"{m.key.kind} {m.key.tensor} becomes {m.value} in step {first.step}; on one device it stays finite."
    evidence = f"{m.key.tensor}: {m.value} against {m.reference_value:.6g} in step {first.step}"
    if whose:
        evidence += f"; the local gradient is not finite on replica {numbers(whose)}"
    if rows is not None:
        evidence += f"; rows per replica in this step: {numbers(rows)}"
    if rows is not None and 0 in rows:
        return Sign(f"A replica without rows divides by zero: {summary}", evidence, _EMPTY)
    return Sign(summary[0].upper() + summary[1:], evidence)


def _whose(case: Case, point: Point) -> tuple[list[int], list[int] | None]:
    """The replicas whose local gradient is not finite, and how many rows each replica had."""
    names = [point.measure.key.optimizer] if point.measure.key.optimizer else case.base.runs.optimizers
    for optimizer in names:
        steps = complete(case.base.runs.topology, optimizer)
        if point.step >= len(steps):
            continue
        step = steps[point.step]
        whose = sorted(
            {r for t in step[min(step)].gradients for r, a in gradients_of(step, t).items() if not np.isfinite(a.norm)}
        )
        counts = [one.rows for _, one in sorted(step.items())]
        return whose, [len(rows) for rows in counts if rows is not None] if None not in counts else None
    return [], None


_TRAINED = ("gradient", "weight")
_EMPTY = (
    "Divide by the rows of all replicas, which is never zero, instead of taking a mean over none:\n"
    "    loss = tf.reduce_sum(per_example_loss) / GLOBAL_BATCH_SIZE\n"
    "or drop the partial batch: dataset.batch(GLOBAL_BATCH_SIZE, drop_remainder=True)."
)

NAN = Cause(
    code="nan",
    title="not a number",
    meaning="A value becomes NaN or infinite on several devices only: a mean over a replica without rows (the rest of "
    "a batch did not "
    "go round), a count of zero, a loss that overflows because it is too large.",
    evidence="The first value that is not finite where the reference's is: which tensor, step and replica, and that "
    "replica's rows.",
    fix="Guard the division that the replica's own rows can make zero (tf.math.divide_no_nan), or divide by the count "
    "over all replicas.",
    search=_search,
)
