"""Detect a step that computes something else with more replicas."""

from __future__ import annotations

import numpy as np

from emulate.probe import common_input
from emulate.probe.trace import Array
from emulate.verify.arithmetic import explain
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, numbers
from emulate.verify.causes.replicas_apart import is_possible, rebase_where_numbers_matter
from emulate.verify.compare import Comparison, explains_up_to
from emulate.verify.lines import made, operations


def _search(case: Case) -> Sign | None:
    first, apart = case.base.first_step("gradient"), case.base.first_step("weight")
    if apart is not None and (first is None or first > apart):
        return _of_update(case, apart)
    if first is None or not is_possible(case) or not any(step == first for _, step in case.explanation.unexplained):
        return None
    replayed = case.switched("replay") if case.ledger is not None and case.ledger.by else None
    if replayed is not None and explains_up_to(replayed, first, case.base):
        return _of_what_it_is_given(case, replayed, first)
    again = case.switched("told") if case.lines.made("num_replicas") else None  # else Keras alone asks, to divide its loss
    how = _how(again, first, case.base) if again is not None else None
    if again is None or how is None:
        return _of_other_inputs(case, first) or _of_number(case, first)
    before = case.base.exceeding[0]
    case.rebase(again, "told")
    if case.explanation.scaled:
        case.explain_fits(case.explanation.scaled)
    return Sign(
        (
            f"The step uses the number of replicas ({case.num_replicas}) for more than dividing the loss. The same "
            "examples and weights get different gradients with more replicas."
        ),
        (
            f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {first} on, by "
            f"{before.ratio:.0f}x the noise floor; one device with the same examples, given {case.num_replicas} as "
            f"the number of replicas, {how}"
        ),
    )


def _of_number(case: Case, step: int) -> Sign | None:
    """Check whether one device that reads each replica's number has the same gradients."""
    before = case.base.exceeding[0]
    agrees = rebase_where_numbers_matter(case, step)
    if agrees is None:
        return None
    return Sign(
        (
            "The result of a replica depends on its id (replica_id_in_sync_group): the same examples have "
            "different gradients on another replica."
        ),
        (
            f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {step} on, by "
            f"{before.ratio:.0f}x the noise floor; {agrees}"
        ),
        _ALIKE,
        blame=(made("loss", "replica number", in_step=True),),
    )


def _of_what_it_is_given(case: Case, replayed: Comparison, step: int) -> Sign:
    """Report that one device with the same inputs, and no other replica, has the same gradients."""
    before = case.base.exceeding[0]
    case.rebase(replayed, "replay")
    return Sign(
        (
            "The program gives the step other inputs for the same examples: for example computed by one replica for "
            "all, or combined in another order than the examples."
        ),
        (
            f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {step} on, by "
            f"{before.ratio:.0f}x the noise floor; one device that gets the same inputs and the same examples has the "
            "same gradients, without any other replica"
        ),
        _SAME_INPUTS,
    )


def _of_other_inputs(case: Case, step: int) -> Sign | None:
    """Check whether one device has the same gradients with the numbers that this run's step gets besides its examples."""
    optimizer = next(name for name, k in case.explanation.unexplained if k == step)
    ours, theirs = case.base.runs.pairs(optimizer)[step]
    own = next(iter(theirs.values()))
    others = [place for place in range(len(own.inputs)) if place not in own.row_inputs]
    values = {place: [common_input(list(side.values()), place) for side in (ours, theirs)] for place in others}
    apart = [(place, ours, theirs) for place, (ours, theirs) in values.items() if _differ(ours, theirs)]
    replayed = case.switched("inputs") if apart else None
    if replayed is None or not explains_up_to(replayed, step, case.base):
        return None
    before = case.base.exceeding[0]
    case.rebase(replayed, "inputs")
    place, *both = apart[0]
    is_, was = (numbers([f"{number:.6g}" for number in np.ravel(value)[:_SHOWN]]) for value in both if value is not None)
    return Sign(
        (
            f"From step {step} on the program gives the step other numbers than on one device: input {place + 1} is {is_} "
            f"instead of {was}."
        ),
        (
            f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {step} on, by "
            f"{before.ratio:.0f}x the noise floor; one device that gets the same inputs has the same gradients"
        ),
        _OTHER_NUMBERS,
        blame=(operations("loss", "scale", "mean", "sum"),),
    )


def _differ(ours: Array | None, theirs: Array | None) -> bool:
    return ours is not None and theirs is not None and not np.array_equal(ours, theirs)


def _of_update(case: Case, step: int) -> Sign | None:
    """Check whether gradients agree and weights do not, because the update depends on the number of replicas."""
    left = [p for p in case.left() if p.step == step and p.measure.key.kind == "weight"]
    again = case.switched("batch-of") if left and is_possible(case) else None
    if again is None or not explains_up_to(again, step, case.base):
        return None
    case.rebase(again, "batch-of")
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
    )


def _how(again: Comparison, step: int, before: Comparison) -> str | None:
    """Return how one device that reads the number has the same gradients: exactly, or except for the loss's divisor."""
    if explains_up_to(again, step, before):
        return "has the same gradients"
    explanation = explain(again)
    fits = [fit for fit in explanation.scaled if fit.step == step and not (fit.decay or fit.shares)]
    if not fits or any(unexplained == step for _, unexplained in explanation.unexplained):
        return None
    return f"has the same gradients except for one factor, {fits[0].scale:.4g}, by which it divides the loss"


_ALIKE = "If it depends on the id of a replica"
_OTHER_NUMBERS = "If the step gets other numbers"
_SHOWN = 3
"""So many numbers of an input are shown."""
_SAME_INPUTS = "If the inputs of the step are mixed up"
_SAME_UPDATE = "If the update depends on it"


DEPENDS_ON_REPLICAS = Cause(
    "depends-on-replicas", _search, blame=(made("loss", "num_replicas", in_step=True), made("start", "num_replicas"))
)
