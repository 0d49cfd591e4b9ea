"""Detect batches that are applied together, fewer on several devices, and what is done to each of them."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, as_factor, names_in_words, steps_in_words
from emulate.verify.fit import ROUND, Fit
from emulate.verify.gradients import objective
from emulate.verify.lines import between, operations


def _search(case: Case) -> Sign | None:
    for optimizer in case.base.runs.optimizers:
        ours, theirs = case.base.runs.batches(optimizer)
        if ours != theirs:
            count = f"{ours} on {case.num_replicas} replicas, {theirs} on one device"
            fits = [fit for fit in case.explanation.fits if fit.optimizer == optimizer]
            sign = _added_up(case, fits, ours / theirs, count) or _decayed(case, fits, count)
            sign = sign or _changed(case, optimizer, ours / theirs, count)
            if sign is not None:
                return sign
    return None


def _added_up(case: Case, fits: list[Fit], ratio: float, count: str) -> Sign | None:
    """Check whether the step grows with the number of its batches."""
    if not fits or any(abs(fit.scale / ratio - 1) > ROUND or fit.shares or fit.replicated for fit in fits):
        return None
    case.explain_fits(fits, lambda point: abs(point.factor / ratio - 1) < 10 * ROUND)
    return Sign(
        f"Gradients of several batches are summed for one update and not divided by the number of batches: {count}.",
        (
            f"gradient / gradient of one device = {as_factor(ratio)} for all variables in {steps_in_words(fits)}, the ratio "
            f"of the numbers of batches; after dividing by it the remaining error is {max(fit.after for fit in fits):.1f}x "
            "the noise floor"
        ),
    )


def _decayed(case: Case, fits: list[Fit], count: str) -> Sign | None:
    """Check whether a term that does not depend on examples is added once for each batch."""
    if not fits or any(not fit.decay or fit.shares or abs(fit.scale - 1) > ROUND for fit in fits):
        return None
    case.explain_fits(fits)
    names = names_in_words(list(dict.fromkeys(name for fit in fits for name in fit.decay)))
    return Sign(
        f"A regularization or decay is added once for each batch of an update: {count}.",
        (
            f"In {steps_in_words(fits)} the gradient of {names} is that of one device plus a multiple of the weights; "
            f"without this multiple the remaining error is {max(fit.after for fit in fits):.1f}x the noise floor"
        ),
    )


def _changed(case: Case, optimizer: str, ratio: float, count: str) -> Sign | None:
    """Check whether the loss of a step agrees and its gradients do not."""
    step = case.base.first_step("gradient", "weight")
    if (optimizer, step) not in case.explanation.unexplained and not any(
        (fit.optimizer, fit.step) == (optimizer, step) for fit in case.explanation.weighted
    ):
        return None
    assert step is not None
    pairs = case.base.runs.pairs(optimizer)
    here, there = (objective(of_run) for of_run in pairs[step])
    if here is None or not there or min(abs(here / there - 1), abs(here / there / ratio - 1)) > ROUND:
        return None
    again = case.switched("no-clipping") if case.facts.clips else None
    evidence = f"In step {step} the loss agrees, but the gradients that enter the optimizer do not"
    if again is not None and again.is_equivalent_but_for_kinks:
        case.rebase(again, "no-clipping")
        evidence += "; with clipping switched off in both runs everything agrees"
    else:
        case.cut(step, "each batch of an update is changed on its own")
    return Sign(
        f"Each batch of an update is changed on its own (clipped, normalized) before the batches are summed: {count}.",
        evidence,
    )


ACCUMULATION = Cause(
    "accumulation",
    _search,
    blame=(operations("given", "norm"), operations("sum", "norm"), operations("loss", "mean", "scale"), between("given")),
)
