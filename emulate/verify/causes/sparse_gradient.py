"""Detect sparse gradients that are not summed row by row, by the optimizer or by the program."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.compared_runs import complete
from emulate.verify.lines import between, operations


def _search(case: Case) -> Sign | None:
    return _of_values(case) or _of_the_optimizer(case)


def _of_values(case: Case) -> Sign | None:
    """Check whether the program adds up the values of a sparse gradient, whose rows on each replica are others."""
    out = [
        p for p in case.base.exceeding if p.measure.key.kind == "gradient" and p.measure.key.tensor in case.facts.values_added
    ]
    first = min(out, key=lambda point: point.step, default=None)
    if first is None or first.step != case.base.first_step("gradient"):
        return None
    tensor, step = first.measure.key.tensor, first.step
    case.explain(lambda point: point.measure.key.tensor == tensor or point.step > step)
    return Sign(
        f"The values of a sparse gradient ({tensor}) are added up over the replicas, and the rows they belong to are not.",
        (
            f"The step gives the values of a tf.IndexedSlices to all_reduce; in step {step} the gradient of {tensor} differs "
            f"by {first.ratio:.0f}x the noise floor"
        ),
        _OF_VALUES,
        blame=[operations("sum", "all_reduce"), between("given")],
    )


def _of_the_optimizer(case: Case) -> Sign | None:
    """Check whether gradients agree, and only weights with sparse gradients differ, from their first step on."""
    apart, before = case.base.first_step("weight"), case.base.first_step("gradient")
    if apart is None or (before is not None and before <= apart):
        return None
    out = [p for p in case.base.exceeding if p.step == apart and p.measure.key.kind == "weight"]
    optimizer = out[0].measure.key.optimizer
    steps = complete(case.base.runs.topology, optimizer)
    if apart >= len(steps):
        return None
    sparse = {name for local in steps[apart].values() for name, array in local.gradients.items() if array.rows is not None}
    tensors = sorted({point.measure.key.tensor for point in out})
    if not set(tensors) <= sparse:
        return None
    agreeing = {p.measure.key.tensor for p in case.base.points if p.step == apart and p.measure.key.kind == "weight"}
    case.explain_update(apart)
    worst = max(out, key=lambda point: point.ratio)
    return Sign(
        f"The optimizer updates {tensors[0]} from a sparse gradient that has a row once for each replica that looked it up.",
        (
            f"in step {apart} all gradients agree; of {len(agreeing)} weights only {len(tensors)} with a sparse "
            f"gradient (tf.IndexedSlices) differ: {', '.join(tensors[:3])}, by {worst.ratio:.0f}x the noise floor"
        ),
    )


_OF_VALUES = "If the program adds up the values itself"

# What examples look up comes as often on one device; what they share comes once for each replica.
SPARSE_GRADIENT = Cause("sparse-gradient", _search, blame=(operations("loss", "looks-up-the-same", "looks-up"),))
