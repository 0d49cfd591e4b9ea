"""Detect an update that is larger or smaller by one factor: a learning rate that depends on the cluster's size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from emulate.digits import told_apart
from emulate.probe.trace import Trace
from emulate.verify.arithmetic import factor_of_updates
from emulate.verify.case import RATE, Case
from emulate.verify.causes.cause import Cause, Sign, as_factor
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.fit import ROUND
from emulate.verify.gradients import names_of, weight_of, weights_before
from emulate.verify.lines import made

_LARGEST_PART = 64
"""Factors are taken for fractions of numbers up to this one, and for their square roots."""
_IS_MEANT = 1e-5
"""So far, in parts of itself, a measured factor may be off by rounding."""


def _search(case: Case) -> Sign | None:
    return _of_weights(case) or _of_a_larger_batch(case)


def _of_weights(case: Case) -> Sign | None:
    """Check whether gradients agree and weights do not: by which factor, or by which other setting."""
    first = first_of_update(case)
    if first is None or any(point.step < first.step for point in case.left() if point.measure.key.kind in REPORTED):
        return None  # a host that reads a wrong number may make its rate of it
    m = first.measure
    what = f"{m.key.tensor} is {m.in_print[0]}, {m.in_print[1]} on one device ({first.ratio:.0f}x the noise floor)"
    ours, theirs = (_known(trace, m.key.optimizer) for trace in (case.topology, case.reference))
    apart, factor = _set_otherwise(ours, theirs), factor_of(case, first)
    if factor is None or abs(factor - 1) < ROUND:
        return _of_settings(case, first, apart, what) if apart else None
    rates = _rates(ours, theirs)
    is_of_rate = rates is not None and abs(rates[0] - factor * rates[1]) < ROUND * abs(rates[0])
    growth = case.ledger.growth if case.ledger else 1
    suits = is_of_rate and 1 < factor < growth * (1 + ROUND)
    evidence = [f"update / update of one device = {as_factor(factor)} for all variables in step {m.step}", what, *apart]
    summary = f"In step {m.step} the gradients agree, but the weights change {factor:.4g}x as much as on one device."
    if suits:
        summary = f"The batch is {growth}x that of one device, and the learning rate {factor:.4g}x."
    evidence += _enlarge_the_reference(case, first, factor)
    return Sign(summary, "; ".join(evidence), _SUITS if suits else _OF_RATE if is_of_rate else None, advice=suits)


def _of_settings(case: Case, first: Point, apart: list[str], what: str) -> Sign:
    """Report an optimizer that differs in a setting without a factor: a momentum, the steps of a schedule."""
    step = first.step
    case.cut(step + 1, f"in step {step} the same gradients give another update")
    case.explain(lambda point: point.step == step and point.measure.key.kind == "weight")
    summary = f"In step {step} the gradients agree, but the update differs: the optimizer has other settings."
    return Sign(summary, "; ".join([*apart, what]), _OF_RATE)


def _of_a_larger_batch(case: Case) -> Sign | None:
    """Check a run in which one device read the number of replicas, and so computes with their rate."""
    growth = case.ledger.growth if case.ledger else 1
    for optimizer in case.topology.optimizers if growth > 1 else ():
        ours, theirs = (_known(trace, optimizer) for trace in (case.topology, case.plain))
        apart = _set_otherwise(ours, theirs)
        if not apart:
            continue
        rates = _rates(ours, theirs)
        factor = rates[0] / rates[1] if rates and rates[1] else 1.0
        suits = not _is_other(factor) or 1 < factor < growth * (1 + ROUND) or bool(ours.get("scheduled"))
        return Sign(
            f"The batch is {growth}x that of one device, and {optimizer} has other settings too.",
            "; ".join([*apart, "this depends on the number of replicas or workers"]),
            _SUITS if suits else _OTHERWISE,
            advice=suits,
        )
    return None


def _set_otherwise(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return an optimizer's settings that differ between the runs, in words."""
    rates = _rates(ours, theirs)
    of_step = " of its second step" if ours.get("scheduled") else ""
    texts = []
    if rates and _is_other(1 + (rates[0] - rates[1]) / (abs(rates[1]) or 1.0)):
        texts.append("the learning rate{} is {}, {} on one device".format(of_step, *told_apart(*rates, 4)))
    apart = _differing(ours.get("settings", {}), theirs.get("settings", {}))
    return texts + ["{} is {}, {} on one device".format(name, *told_apart(*values, 4)) for name, values in apart.items()]


def _rates(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return an optimizer's initial learning rates, if both are known."""
    rate, other = ours.get("learning_rate"), theirs.get("learning_rate")
    return None if rate is None or other is None else (float(rate), float(other))


def _differing(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return an optimizer's settings that both runs have with different values."""
    return {n: (ours[n], theirs[n]) for n in ours if n in theirs and _is_other(1 + abs(ours[n] - theirs[n]))}


def _is_other(factor: float) -> bool:
    return abs(factor - 1) > _IS_MEANT


def _enlarge_the_reference(case: Case, first: Point, factor: float) -> list[str]:
    """Judge on a reference whose learning rate is as many times as large, else leave out what follows; what that showed."""
    step = first.step
    asked = f"{RATE}{_exact(factor)!r}"
    again = case.switched(asked)
    apart = again.first_step("initial-weight", "gradient", "weight", "variable") if again is not None else step
    if again is not None and again.points and (apart is None or apart > step):
        case.rebase(again, asked)
        agreement = "agrees in all later steps" if apart is None else f"agrees up to step {apart - 1}"
        return [f"one device with {factor:.4g}x the learning rate {agreement}"]
    case.cut(step + 1, f"in step {step} the weights change {factor:.4g}x as much")
    case.explain(lambda point: point.step == step and point.measure.key.kind == "weight")
    return []


def _exact(factor: float) -> float:
    """Return the intended number: a small fraction or its root, if the factor is one up to rounding."""
    for number, root in ((factor, lambda x: x), (factor**2, math.sqrt)):
        near = float(root(Fraction(number).limit_denominator(_LARGEST_PART)))
        if abs(near - factor) < _IS_MEANT * factor:
            return near
    return factor


def _known(trace: Trace, optimizer: str) -> Mapping[str, Any]:
    """Return what the probe learned about an optimizer."""
    entries = (event.get("optimizers", {}).get(optimizer) for _, event in trace.of("program"))
    return next((entry for entry in entries if entry), {})


def first_of_update(case: Case) -> Point | None:
    """Return the first unexplained difference where weights are the first to differ, whatever is reported before."""
    first = next((point for point in case.left() if point.measure.key.kind not in REPORTED), None)
    before = case.base.first_step("gradient", "variable")
    is_late = first is not None and before is not None and before <= first.measure.step
    return None if first is None or first.measure.key.kind != "weight" or is_late else first


def factor_of(case: Case, point: Point) -> float | None:
    """Return the one factor between the updates of a weight's step, or None."""
    runs, optimizer, k = case.base.runs, point.measure.key.optimizer, point.measure.step
    ours, theirs = (complete(trace, optimizer)[k] for trace in (runs.topology, runs.reference))
    return factor_of_updates(
        (weights_before(runs.reference, optimizer, k, tensor), weight_of(ours, tensor), weight_of(theirs, tensor))
        for tensor in names_of(theirs)
    )


REPORTED = ("loss", "metric")
"""Kinds of what is told of a training and is no part of it."""
_OF_RATE = "If the learning rate grows and the batch does not"
_SUITS = "If the learning rate suits a larger batch"
_OTHERWISE = "If the learning rate does not follow the batch"
UPDATE_SCALING = Cause("update-scaling", _search, blame=(made("update", "optimizer"),))
