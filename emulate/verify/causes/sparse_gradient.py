"""Detect an optimizer that gets a table's row once for each replica that looked it up, instead of the sum."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import between, operations
from emulate.verify.measure import complete


def _search(case: Case) -> Sign | None:
    """Check whether gradients agree, and only weights with sparse gradients differ, from their first step on."""
    apart, before = case.base.first_step("weight"), case.base.first_step("gradient")
    if apart is None or (before is not None and before <= apart):
        return None
    out = [p for p in case.base.exceeding if p.step == apart and p.measure.key.kind == "weight"]
    optimizer = out[0].measure.key.optimizer
    steps = complete(case.base.runs.topology, optimizer)
    if apart >= len(steps):
        return None
    sparse = {name for one in steps[apart].values() for name, array in one.gradients.items() if array.rows is not None}
    tensors = sorted({point.measure.key.tensor for point in out})
    if not set(tensors) <= sparse:
        return None
    agreeing = {p.measure.key.tensor for p in case.base.points if p.step == apart and p.measure.key.kind == "weight"}
    case.explain(lambda point: point.step > apart or (point.step == apart and point.measure.key.kind == "weight"))
    worst = max(out, key=lambda point: point.ratio)
    return Sign(
        f"The optimizer updates {tensors[0]} from a sparse gradient that has a row once for each replica that looked it up.",
        (
            f"in step {apart} all gradients agree; of {len(agreeing)} weights only {len(tensors)} with a sparse "
            f"gradient (tf.IndexedSlices) differ: {', '.join(tensors[:3])}, by {worst.ratio:.0f}x the noise floor"
        ),
    )


SPARSE_GRADIENT = Cause("sparse-gradient", _search, blame=(operations("sum", "all_reduce"), between("given")))
