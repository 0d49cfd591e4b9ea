"""Detect other values from equal gradients: updates scaled by one factor, variables that a step assigns, final weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from emulate.told import told_apart
from emulate.trace import StoredArray, Trace
from emulate.verify.arithmetic import ROUND, factor_of_updates, one_factor
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, as_factor, is_assigned, names_in_words, numbers
from emulate.verify.causes.experiments import lines_of, said_by_joins
from emulate.verify.causes.replays import is_possible
from emulate.verify.compare import Point, explains_up_to
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import Floats, aligned, is_numeric, names_of, state_before, state_of, weight_of, weights_before
from emulate.verify.lines import made, operations
from emulate.verify.measure import changed_in_the_end, ends_of_hosts
from emulate.verify.noise import Key
from emulate.verify.run_spec import RATE

_LARGEST_PART = 64
"""Factors are taken for fractions of numbers up to this one, and for their square roots."""
_IS_MEANT = 1e-5
"""So far, in parts of itself, a measured factor may be off by rounding."""


def _of_an_update(case: Case) -> Sign | None:
    """Check whether gradients agree and weights do not: by which factor, or by which other setting."""
    first = first_of_update(case)
    if first is None or any(point.step < first.step for point in case.left() if point.measure.key.kind in REPORTED):
        return None  # a host that reads a wrong number may make its rate of it
    m = first.measure
    what = f"{m.key.tensor} is {m.in_print[0]}, {m.in_print[1]} on one device ({first.ratio:.0f}x the noise floor)"
    ours, theirs = (_settings_of(trace, m.key.optimizer) for trace in (case.topology, case.reference))
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
    enlarged = _on_an_enlarged_reference(case, first, factor)
    evidence += [enlarged.evidence] * bool(enlarged.evidence)
    fix = _SUITS if suits else _OF_RATE if is_of_rate else None
    return replace(enlarged, summary=summary, evidence="; ".join(evidence), fix=fix, advice=suits)


def _of_settings(case: Case, first: Point, apart: list[str], what: str) -> Sign:
    """Report an optimizer that differs in a setting without a factor: a momentum, the steps of a schedule."""
    summary = f"In step {first.step} the gradients agree, but the update differs: the optimizer has other settings."
    then = partial(_leave_out_update, case, first.step, "the same gradients give another update")
    is_built_later = any(text.startswith("built is") for text in apart)
    return Sign(summary, "; ".join([*apart, what]), _OF_BUILD if is_built_later else _OF_RATE, then=then)


def _leave_out_update(case: Case, step: int, why: str) -> None:
    case.cut(step + 1, f"in step {step} {why}")
    case.explain(lambda point: point.step == step and point.measure.key.kind == "weight")


def _of_a_larger_batch(case: Case) -> Sign | None:
    """Check a run in which one device read the number of replicas, and so computes with their rate."""
    growth = case.ledger.growth if case.ledger else 1
    for optimizer in case.topology.optimizers if growth > 1 else ():
        ours, theirs = (_settings_of(trace, optimizer) for trace in (case.topology, case.plain))
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
    mine, other = ours.get("settings", {}), theirs.get("settings", {})
    apart = {n: (mine[n], other[n]) for n in mine if n in other and _is_other(1 + abs(mine[n] - other[n]))}
    return texts + ["{} is {}, {} on one device".format(name, *told_apart(*values, 4)) for name, values in apart.items()]


def _rates(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return an optimizer's initial learning rates, if both are known."""
    rate, other = ours.get("learning_rate"), theirs.get("learning_rate")
    return None if rate is None or other is None else (float(rate), float(other))


def _is_other(factor: float) -> bool:
    return abs(factor - 1) > _IS_MEANT


def _on_an_enlarged_reference(case: Case, first: Point, factor: float) -> Sign:
    """Check a reference whose learning rate is as many times as large; where it says nothing, leave out what follows."""
    step = first.step
    asked = f"{RATE}{_exact(factor)!r}"
    again = case.switch(asked)
    apart = again.first_step("initial-weight", "gradient", "weight", "variable") if again is not None else step
    if again is not None and again.points and (apart is None or apart > step):
        agreement = "agrees in all later steps" if apart is None else f"agrees up to step {apart - 1}"
        evidence = f"one device with {factor:.4g}x the learning rate {agreement}"
        return Sign(evidence=evidence, then=lambda: case.rebase(again, asked))
    return Sign(then=lambda: _leave_out_update(case, step, f"the weights change {factor:.4g}x as much"))


def _exact(factor: float) -> float:
    """Return the intended number: a small fraction or its root, if the factor is one up to rounding."""
    for number, root in ((factor, lambda x: x), (factor**2, math.sqrt)):
        near = float(root(Fraction(number).limit_denominator(_LARGEST_PART)))
        if abs(near - factor) < _IS_MEANT * factor:
            return near
    return factor


def _settings_of(trace: Trace, optimizer: str) -> Mapping[str, Any]:
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
_OF_BUILD = "If fit builds the optimizer on one device only"
_SUITS = "If the learning rate suits a larger batch"
_OTHERWISE = "If the learning rate does not follow the batch"
UPDATE_SCALING = Cause(
    "update-scaling", lambda case: _of_an_update(case) or _of_a_larger_batch(case), blame=(made("update", "optimizer"),)
)


def _search_dependence(case: Case) -> Sign | None:
    """Check whether gradients agree and weights do not, because the update depends on the number of replicas."""
    step, before = case.base.first_step("weight"), case.base.first_step("gradient")
    if step is None or (before is not None and before <= step):
        return None
    left = [p for p in case.left() if p.step == step and p.measure.key.kind == "weight"]
    again = case.switch("batch-of") if left and is_possible(case) else None
    if again is None or not explains_up_to(again, step, case.base):
        return None
    return Sign(
        (
            f"The update of the weights depends on the number of replicas ({case.num_replicas}): the same gradients "
            "give other weights with more replicas."
        ),
        (
            f"{left[0].measure.key.tensor} differs after step {step}, by {left[0].ratio:.0f}x the noise floor, and "
            f"its gradient agrees; one device with the same examples, given {case.num_replicas} as the number of "
            "replicas, has the same weights"
        ),
        _SAME_UPDATE,
        then=lambda: case.rebase(again, "batch-of"),
    )


_SAME_UPDATE = "If the update depends on it"
DEPENDS_IN_UPDATE = Cause("depends-on-replicas", _search_dependence, blame=(made("start", "num_replicas"),))


def _search_assigned(case: Case) -> Sign | None:
    """Check for variables before gradients are explained: those that a step reads, since gradients may follow from them."""
    if (read := _of_what_the_loss_reads(case)) is not None:
        return read
    points = _assigned_points(case, are_read=True)
    return _of_assigned(case, points) if points else _of_first(case) if _has_a_factor_of_its_own(case) else None


def _search_left(case: Case) -> Sign | None:
    """Check for variables once gradients are explained: those that no step reads, and those that nothing else explains."""
    points = _assigned_points(case, are_read=False)
    return (_of_assigned(case, points) if points else None) or _of_first(case) or _of_copies(case)


def _assigned_points(case: Case, *, are_read: bool) -> list[Point]:
    return [p for p in case.base.exceeding if is_assigned(case, p) and _is_read(case, p.measure.key.tensor) is are_read]


def _is_read(case: Case, name: str) -> bool:
    """Return whether gradients or weights may depend on a variable: where a step has no graph, that is not known."""
    return case.facts.reads.get(name, True)


def _has_a_factor_of_its_own(case: Case) -> bool:
    """Return whether the first gradients that differ do so by one factor that is none of the number of replicas.

    Some number makes it, and no other cause says which. Shares of rows and multiples of weights have causes of their own.
    """
    onset = case.base.first_step("gradient", "weight")
    fits = [fit for fit in case.explain_gradients().fits if fit.step == onset]
    are_of_replicas = any(_is_of_replicas(case, fit.scale) for fit in fits)
    return bool(fits) and not are_of_replicas and not any(fit.shares or fit.decay or fit.replicated for fit in fits)


def _is_of_replicas(case: Case, factor: float) -> bool:
    return any(abs(factor / count - 1) < ROUND for count in (float(case.num_replicas), 1 / case.num_replicas))


def _of_what_the_loss_reads(case: Case) -> Sign | None:
    """Check for a variable that each replica assigns from its own examples, and that the loss of the same step reads."""
    if not case.lines.of("assigned"):
        return None
    joins = case.joins
    if joins is None or not joins.assigned or len(joins.assigned) < len(joins.members):
        return None

    def leave_out() -> None:
        why = "replicas assign to a variable what their own examples give, and their losses read it"
        case.cut(joins.step, why, at=("variable",))
        case.explain(partial(is_assigned, case))

    return Sign(
        "Each replica assigns to a variable what its own examples give, and its loss reads that in the same step.",
        said_by_joins(case, joins.assigned),
        _OF_EXAMPLES,
        blame=lines_of(joins.assigned),
        then=leave_out,
    )


def _of_assigned(case: Case, points: list[Point]) -> Sign | None:
    """Check for values that differ from those of one device, before gradients differ or without that."""
    step = min(point.step for point in points)
    first = [point for point in points if point.step == step]
    # Where another cause has changed the base, gradients agree there: what followed from them is seen in the original runs.
    every = [*case.base.exceeding, *(p for p in case.comparison.exceeding if p.measure.key.kind in ("gradient", "weight"))]
    trained = [point for point in every if point.measure.key.kind in _TRAINED and not is_assigned(case, point)]
    early = min((point.measure.step for point in trained), default=None)
    # A counter follows from no gradient; all else may, and what an optimizer by hand keeps does from those of the same step.
    at_once = [point.measure.key.kind for point in trained if point.step == step]
    is_of_all = any(point.measure.key.tensor in case.facts.shared for point in first) and "gradient" not in at_once
    values = [_assigned_value(case.base.runs.reference, point.measure.key, point.step) for point in first]
    are_counters = all(value is not None and not is_numeric(value) for value in values)
    if early is not None and (early < step or (early == step and not (is_of_all or are_counters))):
        return None
    if is_of_all and at_once and _is_read(case, first[0].measure.key.tensor):
        return _of_shared(case, first)
    names = [point.measure.key.tensor for point in first]
    factor = _factor_of_assigned(case, first)

    def leave_out() -> None:
        if early is not None and _is_read(case, names[0]) and case.joins is None:
            case.cut(step + (early != step), f"{names_in_words(names, 1)} differs from there on", at=("variable",))
        case.explain(partial(is_assigned, case), always=True)

    # Variables hold the mean of what replicas have parts of, as of gradients; a number may be a count.
    are_of_parts = all(value is not None and is_numeric(value) and value.shape for value in values)
    if early is None and factor is not None and are_of_parts and abs(factor * case.num_replicas - 1) < ROUND:
        return Sign(
            f"What the replicas assign to {names_in_words(names)} is averaged: it is their mean, and their sum on one device.",
            f"change / change on one device = {as_factor(factor)}, 1 / the number of replicas; all gradients and weights agree",
            _OF_PARTS,
            advice=True,
            tensors=names,
            then=lambda: case.explain_aside(partial(is_assigned, case)),
        )
    numbers = ", ".join(
        f"{point.measure.key.tensor} is {point.measure.in_print[0]}, {point.measure.in_print[1]} on one device"
        for point in first[:1]
    )
    if factor is not None and abs(factor - case.num_replicas) < ROUND * factor:
        return Sign(
            f"What the replicas assign to {names_in_words(names)} is summed: a step changes it {case.num_replicas}x "
            "as much as on one device.",
            f"change / change on one device = {as_factor(factor)} in step {step}, the number of replicas; {numbers}",
            tensors=names,
            then=leave_out,
        )
    return Sign(
        f"From step {step} on the replicas assign other values to {names_in_words(names)} than one device.",
        f"Gradients and weights agree until then; {numbers}, {first[0].ratio:.0f}x the noise floor",
        tensors=names,
        then=leave_out,
    )


def _of_shared(case: Case, points: list[Point]) -> Sign:
    """Check for a shared variable that the update uses and each replica advances."""
    out = [point for point in points if point.measure.key.tensor in case.facts.shared]
    step, m = out[0].step, out[0].measure
    name = names_in_words([point.measure.key.tensor for point in out])

    def leave_out() -> None:
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
        then=leave_out,
    )


def _of_first(case: Case) -> Sign | None:
    """Check for the first replica's value if something computed from it differs later, without another cause."""
    onset = _first_left(case)
    out = [p for p in case.base.of_first if p.exceeds and p.step < onset and _is_read(case, p.measure.key.tensor)]
    if not out or case.base.first_step("loss", "initial-weight") in range(onset):
        return None
    update = first_of_update(case)
    if update is not None and _is_of_replicas(case, factor_of(case, update) or 1.0):
        return None
    name, first = out[0].measure.key.tensor, out[0].measure
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
        then=lambda: case.cut(onset, f"{name} differs before it"),
    )


def _of_copies(case: Case) -> Sign | None:
    """Check for copies that differ between replicas if gradients differ later and nothing else explains it."""
    onset = _first_left(case)
    if not any(step == onset for _, step in case.explain_gradients().unexplained):
        return None
    for optimizer in case.base.runs.optimizers:
        for k, step in enumerate(complete(case.base.runs.topology, optimizer)[:onset]):
            names = list(dict.fromkeys(name for own in step.values() for name in own.state if _is_read(case, name)))
            apart = [name for name in names if len({own.state[name].digest for own in step.values() if name in own.state}) > 1]
            if apart:
                return Sign(
                    f"Each replica has its own value of {names_in_words(apart)}, which the step assigns and uses later.",
                    f"After step {k} the copies differ; gradients and weights agree until step {onset - 1}, and "
                    f"nothing else explains the difference from step {onset} on",
                    tensors=apart,
                    then=partial(case.cut, onset, f"the replicas have different values of {names_in_words(apart, 1)}"),
                )
    return None


def _first_left(case: Case) -> int:
    """Return the first step whose gradients or weights differ, 0 where something explains them."""
    onset = case.base.first_step("gradient", "weight")
    left = (point.measure.step for point in case.left() if point.measure.key.kind in ("gradient", "weight"))
    return onset if onset is not None and onset in left else 0


_OF_EXAMPLES = "If the value depends on the examples"
_IN_THE_SCOPE = "If all replicas share one variable"
_OF_PARTS = "If the optimizer makes up for the mean"
_COUNT_ALL = "If it counts the examples of one replica"
_TRAINED = ("initial-weight", "gradient", "weight")


def _assigned_value(trace: Trace, key: Key, step: int) -> StoredArray | None:
    of_all = complete(trace, key.optimizer)[step]
    return weight_of(of_all, key.tensor) if key.kind == "weight" else state_of(of_all, key.tensor)


def _factor_of_assigned(case: Case, points: list[Point]) -> float | None:
    """Return the one factor between the changes of variables in a step and on one device, or None."""
    runs = case.base.runs
    changes: list[tuple[Floats, Floats]] = []
    for point in points:
        key, step = point.measure.key, point.step
        ours, theirs = (_assigned_value(trace, key, step) for trace in (runs.topology, runs.reference))
        if ours is None or theirs is None:
            continue
        read_before = weights_before if key.kind == "weight" else state_before
        before = read_before(runs.reference, key.optimizer, step, key.tensor)
        if before is None and is_numeric(theirs):
            continue
        values = aligned([ours, theirs, *([before] if before is not None else [])])
        start = values[2] if before is not None else np.zeros_like(values[0])  # a counter begins at 0
        changes.append((values[0] - start, values[1] - start))
    return one_factor(changes)


VARIABLE_AGGREGATION = Cause("variable-aggregation", _search_assigned, blame=(operations("assigned", "assign"),))
VARIABLES_LEFT = replace(VARIABLE_AGGREGATION, search=_search_left)


def _search_final(case: Case) -> Sign | None:
    left = case.left()
    out = [point for point in left if point.measure.key.kind == "final-weight"]
    if len(out) < len(left):
        return None
    if not out:
        return _hosts_apart(case)
    names, runs, first = [p.measure.key.tensor for p in out], case.base.runs.as_they_came, out[0]
    changing = [set(changed_in_the_end(trace)) & set(names) for trace in (runs.topology, runs.reference)]
    if not all(changing):
        where = "here, but not on one device" if changing[0] else "on one device, but not here"
        what = f"After the last step the program replaces {names_in_words(names)} {where}."
    else:
        factors = [point.factor for point in out]
        is_one = all(abs(factor - factors[0]) <= ROUND * abs(factors[0]) for factor in factors)
        times = f": it is {factors[0]:.4g}x that" if is_one else ""
        what = f"After the last step the program replaces {names_in_words(names)} by other values than on one device{times}."
    m = first.measure
    return Sign(
        what,
        f"the weights agree after each of the {first.step} steps; at the end {m.key.tensor} is {m.in_print[0]}, "
        f"{m.in_print[1]} on one device ({first.ratio:.0f}x the noise floor)",
        then=lambda: case.explain(lambda point: point.measure.key.kind == "final-weight"),
    )


def _hosts_apart(case: Case) -> Sign | None:
    """Check whether the first host's final weights are right and another host's differ."""
    ends = ends_of_hosts(case.untouched)
    apart = [name for name, hosts in ends.items() if len({end for end in hosts.values() if end is not None}) > 1]
    if not apart:
        return None
    by_end: dict[str, list[str]] = {}
    for host, end in ends[apart[0]].items():
        by_end.setdefault(end or "", []).append(f"host {host}")
    groups = numbers([f"({', '.join(hosts[:4])}{', ...' if hosts[4:] else ''})" for hosts in list(by_end.values())[:4]])
    return Sign(
        f"After the last step the hosts replace {names_in_words(apart)} by different values.",
        f"bits of {apart[0]} at the end: {groups} agree only among themselves; after the last step all agreed",
    )


FINAL_WEIGHTS = Cause("final-weights", _search_final, blame=(made("ending", "restore"),))
