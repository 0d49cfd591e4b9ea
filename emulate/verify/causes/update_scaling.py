"""An update that is larger or smaller by one factor: a learning rate that follows the size of the cluster."""

from __future__ import annotations

import math
from fractions import Fraction

from emulate.probe.trace import Trace
from emulate.verify.arithmetic import ROUND, one_factor
from emulate.verify.arrays import Floats, aligned
from emulate.verify.case import RATE, Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.compare import Point
from emulate.verify.gradients import names_of, weight_of, weights_before
from emulate.verify.measure import complete

_LARGEST_PART = 64
"""Factors are taken for fractions of numbers up to this one, and for their square roots."""
_IS_MEANT = 1e-5
"""So far, in parts of itself, a measured factor may be off by rounding."""


def _search(case: Case) -> Sign | None:
    first = next(iter(case.left()), None)
    before = case.base.first_step("gradient", "variable")
    if first is None or first.measure.key.kind != "weight" or (before is not None and before <= first.measure.step):
        return None
    m = first.measure
    factor = _factor(case, m.key.optimizer, m.step)
    if factor is None or abs(factor - 1) < ROUND:
        return None
    ours, theirs = (_rate(trace, m.key.optimizer) for trace in (case.topology, case.reference))
    is_of_rate = ours is not None and theirs is not None and abs(ours - factor * theirs) < ROUND * abs(ours)
    growth = case.ledger.growth if case.ledger else 1
    suits = is_of_rate and 1 < factor < growth * (1 + ROUND)
    what = f"{m.key.tensor} is {m.value:.6g}, {m.reference_value:.6g} on one device ({first.ratio:.0f} times the noise floor)"
    evidence = f"update / update of the reference = {factor:.4f} over all tensors of step {m.step}; {what}"
    if is_of_rate:
        evidence = f"{evidence}; the learning rate begins with {ours:.4g}, on one device with {theirs:.4g}"
    agrees = _enlarge_the_reference(case, first, factor)
    summary = f"In step {m.step} the gradients agree, but the weights change by {factor:.4g} times as much as on one device."
    if suits:
        summary = f"The batch is {growth} times that of one device, and the learning rate {factor:.4g} times."
    return Sign(summary, f"{evidence}{agrees}", _SUITS if suits else _OF_RATE if is_of_rate else None, advice=suits)


def _enlarge_the_reference(case: Case, first: Point, factor: float) -> str:
    """Judge on a reference whose learning rate is as many times as large, else leave out what follows; what that showed."""
    step = first.step
    asked = f"{RATE}{_exact(factor)!r}"
    again = case.switched(asked)
    apart = again.first_step("initial-weight", "gradient", "weight", "variable") if again is not None else step
    if again is not None and again.points and (apart is None or apart > step):
        case.rebase(again, asked)
        agreement = "agrees in all that follows" if apart is None else f"agrees up to step {apart - 1}"
        return f"; one device with {factor:.4g} times the learning rate {agreement}"
    case.cut(step + 1, f"in step {step} the weights change by {factor:.4g} times as much")
    case.explain(lambda point: point.step == step and point.measure.key.kind == "weight")
    return ""


def _exact(factor: float) -> float:
    """The number that is meant: a fraction of small ones or its root, where the factor is one but for rounding."""
    for number, root in ((factor, lambda x: x), (factor**2, math.sqrt)):
        near = float(root(Fraction(number).limit_denominator(_LARGEST_PART)))
        if abs(near - factor) < _IS_MEANT * factor:
            return near
    return factor


def _rate(trace: Trace, optimizer: str) -> float | None:
    """The learning rate that an optimizer starts with."""
    known = (event.get("optimizers", {}).get(optimizer, {}).get("learning_rate") for _, event in trace.of("program"))
    return next((float(rate) for rate in known if rate is not None), None)


def _factor(case: Case, optimizer: str, k: int) -> float | None:
    """The one factor between the updates of a step, None where there is none."""
    runs = case.base.runs
    ours, theirs = (complete(trace, optimizer)[k] for trace in (runs.topology, runs.reference))
    changes: list[tuple[Floats, Floats]] = []
    for tensor in names_of(theirs):
        stored = [weights_before(runs.reference, optimizer, k, tensor), weight_of(ours, tensor), weight_of(theirs, tensor)]
        known = [array for array in stored if array is not None]
        if len(known) == len(stored):
            before, one, other = aligned(known)
            changes.append((one - before, other - before))
    return one_factor(changes)


_OF_RATE = (
    "The batch is the same on every topology, and so is the step that suits it. Say the learning rate as a number of the "
    "program's configuration, not as\n"
    "    BASE_RATE * number_of_workers\n"
    "which suits a batch that grows with the workers. A run that is meant to be another one: --allow update-scaling."
)
_SUITS = (
    "None is needed: a rate that grows with the batch, as the batch does or as its root, is a rule that many follow. It is to "
    "train as well as one device does, not the same weights. Where those are meant, leave both as they are on one device."
)
UPDATE_SCALING = Cause(
    code="update-scaling",
    title="every weight changes by one factor more",
    meaning="From the same gradients the optimizer makes updates that are larger or smaller by one factor: the learning rate "
    "follows the number of workers, or the summed gradients are multiplied once more.",
    evidence="Gradients agree and the weights' change is one factor, the same for all tensors, times that of one device. Where "
    "learning rates are known and their ratio is that factor, they are told. A batch that grows with the replicas, and a rate "
    "that grows no faster, is advice: one device with the same batch and rate has the same weights.",
    fix="Look at what changes the gradients after they are added up, or at a learning rate that depends on the number of "
    "workers (then the run is another one by intent: --allow update-scaling).",
    search=_search,
)
