"""Detect variables that every replica assigns in its step, with another result than on one device."""

from __future__ import annotations

import numpy as np

from emulate.probe.trace import StoredArray, Trace
from emulate.verify.arithmetic import one_factor
from emulate.verify.arrays import Floats, aligned, is_numeric
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, as_factor, names_in_words
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.fit import ROUND
from emulate.verify.gradients import names_of, state_before, state_of, weight_of, weights_before
from emulate.verify.lines import operations
from emulate.verify.noise import Key


def _search(case: Case) -> Sign | None:
    points = [point for point in case.base.exceeding if is_assigned(case, point)]
    return (_of_values(case, points) if points else _of_first(case)) or _of_copies(case)


def _of_values(case: Case, points: list[Point]) -> Sign | None:
    """Check for values that differ from those of one device, before gradients differ or without that."""
    step = min(point.step for point in points)
    first = [point for point in points if point.step == step]
    trained = [point for point in case.base.exceeding if point.measure.key.kind in _TRAINED and not is_assigned(case, point)]
    early = min((point.measure.step for point in trained), default=None)
    # A counter follows from no gradient; all else may, and what an optimizer by hand keeps does from those of the same step.
    at_once = [point.measure.key.kind for point in trained if point.step == step]
    is_of_all = any(point.measure.key.tensor in case.facts.shared for point in first) and "gradient" not in at_once
    if early is not None and (early < step or (early == step and not (is_of_all or all(_counts(case, p) for p in first)))):
        return None
    if is_of_all and at_once:
        return _of_shared(case, first)
    names = [point.measure.key.tensor for point in first]
    factor = _factor(case, first)
    if early is not None:
        case.cut(step if early == step else step + 1, f"{names_in_words(names, 1)} differs from there on", at=("variable",))
    if early is None and factor is not None and _is_a_mean_of_parts(case, first, factor):
        case.explain_aside(lambda point: is_assigned(case, point))
        return Sign(
            f"What the replicas assign to {names_in_words(names)} is averaged: it is their mean, and their sum on one device.",
            f"change / change on one device = {as_factor(factor)}, 1 / the number of replicas; all gradients and weights agree",
            _OF_PARTS,
            advice=True,
            tensors=names,
        )
    case.explain(lambda point: is_assigned(case, point))
    numbers = ", ".join(
        f"{point.measure.key.tensor} is {point.measure.in_print[0]}, {point.measure.in_print[1]} on one device"
        for point in first[:1]
    )
    if factor is not None and abs(factor - case.num_replicas) < ROUND * factor:
        return Sign(
            (
                f"What the replicas assign to {names_in_words(names)} is summed: a step changes it {case.num_replicas}x "
                "as much as on one device."
            ),
            f"change / change on one device = {as_factor(factor)} in step {step}, the number of replicas; {numbers}",
            tensors=names,
        )
    return Sign(
        f"From step {step} on the replicas assign other values to {names_in_words(names)} than one device.",
        f"Gradients and weights agree until then; {numbers}, {first[0].ratio:.0f}x the noise floor",
        tensors=names,
    )


def _is_a_mean_of_parts(case: Case, points: list[Point], factor: float) -> bool:
    """Return whether variables hold the mean of what replicas have parts of, as of gradients; a number may be a count."""
    values = [_value(case.base.runs.reference, point.measure.key, point.step) for point in points]
    is_of_parts = all(value is not None and is_numeric(value) and value.shape for value in values)
    return is_of_parts and abs(factor * case.num_replicas - 1) < ROUND


def _of_shared(case: Case, points: list[Point]) -> Sign:
    """Check for a shared variable that the update uses and each replica advances."""
    out = [point for point in points if point.measure.key.tensor in case.facts.shared]
    step, m = out[0].step, out[0].measure
    name = names_in_words([point.measure.key.tensor for point in out])
    case.cut(step + 1, f"{name} and the weights differ from step {step} on")
    case.explain(lambda point: is_assigned(case, point) or (point.step == step and point.measure.key.kind == "weight"))
    return Sign(
        (
            f"All replicas of a host share one {name}: each replica assigns it in turn, from the value that the "
            "replica before it left."
        ),
        (
            f"In step {step} the gradients agree; {m.key.tensor} is {m.in_print[0]}, {m.in_print[1]} on one "
            "device, and the weights that are computed from it differ"
        ),
        _IN_THE_SCOPE,
        tensors=[point.measure.key.tensor for point in out],
    )


def _of_first(case: Case) -> Sign | None:
    """Check for the first replica's value if something computed from it differs later, without another cause."""
    onset = case.base.first_step("gradient", "weight") or 0
    out = [point for point in case.base.of_first if point.exceeds and point.step < onset]
    if not out or case.base.first_step("loss", "initial-weight") in range(onset):
        return None
    fits = [fit for fit in case.explanation.fits if fit.step == onset]
    if any(fit.shares or fit.decay or fit.replicated or _is_of_replicas(case, fit.scale) for fit in fits):
        return None
    name, first = out[0].measure.key.tensor, out[0].measure
    case.cut(onset, f"{name} differs before it")
    return Sign(
        (
            f"The value that the first replica assigns to {name} is used for all replicas, and differs from that of "
            "one device; later the gradients or weights differ."
        ),
        (
            f"{name} is {first.in_print[0]} after step {first.step}, {first.in_print[1]} on one device; "
            f"gradients and weights agree until step {onset - 1}, and nothing else explains the difference from step "
            f"{onset} on"
        ),
        _COUNT_ALL,
        tensors=[name],
    )


def _of_copies(case: Case) -> Sign | None:
    """Check for copies that differ between replicas if gradients differ later and nothing else explains it."""
    onset = case.base.first_step("gradient", "weight")
    if onset is None or not any(step == onset for _, step in case.explanation.unexplained):
        return None
    for optimizer in case.base.runs.optimizers:
        for k, step in enumerate(complete(case.base.runs.topology, optimizer)[:onset]):
            names = list(dict.fromkeys(name for own in step.values() for name in own.state))
            apart = [name for name in names if len({own.state[name].digest for own in step.values() if name in own.state}) > 1]
            if apart:
                case.cut(onset, f"the replicas have different values of {names_in_words(apart, 1)}")
                return Sign(
                    f"Each replica has its own value of {names_in_words(apart)}, which the step assigns and uses later.",
                    (
                        f"After step {k} the copies differ; gradients and weights agree until step {onset - 1}, and "
                        f"nothing else explains the difference from step {onset} on"
                    ),
                    tensors=apart,
                )
    return None


def _is_of_replicas(case: Case, scale: float) -> bool:
    return any(abs(scale / count - 1) < ROUND for count in (float(case.num_replicas), 1 / case.num_replicas))


_IN_THE_SCOPE = "If all replicas share one variable"
_OF_PARTS = "If the optimizer makes up for the mean"
_COUNT_ALL = "If it counts the examples of one replica"
_TRAINED = ("initial-weight", "gradient", "weight")


def is_assigned(case: Case, point: Point) -> bool:
    """Return whether a point belongs to a variable that the step assigns: the program's, or an untrained one of a layer."""
    key = point.measure.key
    if key.kind != "weight":
        return key.kind == "variable"
    steps = complete(case.base.runs.reference, key.optimizer)
    return bool(steps) and key.tensor not in names_of(steps[0]) and key.tensor not in case.facts.batchnorm


def _value(trace: Trace, key: Key, step: int) -> StoredArray | None:
    of_all = complete(trace, key.optimizer)[step]
    return weight_of(of_all, key.tensor) if key.kind == "weight" else state_of(of_all, key.tensor)


def _before(trace: Trace, key: Key, step: int) -> StoredArray | None:
    before = weights_before if key.kind == "weight" else state_before
    return before(trace, key.optimizer, step, key.tensor)


def _counts(case: Case, point: Point) -> bool:
    value = _value(case.base.runs.reference, point.measure.key, point.step)
    return value is not None and not is_numeric(value)


def _factor(case: Case, points: list[Point]) -> float | None:
    """Return the one factor between the changes of variables in a step and on one device, or None."""
    runs = case.base.runs
    changes: list[tuple[Floats, Floats]] = []
    for point in points:
        key, step = point.measure.key, point.step
        ours, theirs = (_value(trace, key, step) for trace in (runs.topology, runs.reference))
        if ours is None or theirs is None:
            continue
        before = _before(runs.reference, key, step)
        if before is None and is_numeric(theirs):
            continue
        values = aligned([ours, theirs, *([before] if before is not None else [])])
        start = values[2] if before is not None else np.zeros_like(values[0])  # a counter begins at 0
        changes.append((values[0] - start, values[1] - start))
    return one_factor(changes)


VARIABLE_AGGREGATION = Cause("variable-aggregation", _search, blame=(operations("assigned", "assign"),))
