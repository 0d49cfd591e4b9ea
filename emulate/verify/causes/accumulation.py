"""Several batches that are applied together, fewer on several devices, and what is done to each of them."""

from __future__ import annotations

from emulate.verify.arithmetic import ROUND, Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, steps_in_words
from emulate.verify.gradients import objective


def _search(case: Case) -> Sign | None:
    for optimizer in case.base.runs.optimizers:
        ours, theirs = case.base.runs.batches(optimizer)
        if ours != theirs:
            count = f"{ours} on {case.num_replicas} replicas, {theirs} on one device"
            fits = [fit for fit in case.explanation.fits if fit.optimizer == optimizer]
            found = _added_up(case, fits, ours / theirs, count) or _decayed(case, fits, count)
            found = found or _changed(case, optimizer, ours / theirs, count)
            if found is not None:
                return found
    return None


def _added_up(case: Case, fits: list[Fit], ratio: float, count: str) -> Sign | None:
    """The step grows with the number of its batches."""
    if not fits or any(abs(fit.scale / ratio - 1) > ROUND or fit.shares or fit.replicated for fit in fits):
        return None
    case.explain_fits(fits, lambda point: abs(point.factor / ratio - 1) < 10 * ROUND)
    return Sign(
        f"The gradients of the batches that are applied together are added up and not divided by how many there are: {count}.",
        f"sum of the gradients / reference = {ratio:.4f}, the batches here over those of one device, for all tensors in "
        f"{steps_in_words(fits)}; divided by it, what is left is {max(fit.after for fit in fits):.1f} times the noise floor",
    )


def _decayed(case: Case, fits: list[Fit], count: str) -> Sign | None:
    """What does not depend on the rows comes once with each batch."""
    if not fits or any(not fit.decay or fit.shares or abs(fit.scale - 1) > ROUND for fit in fits):
        return None
    case.explain_fits(fits)
    names = names_in_words(list(dict.fromkeys(name for fit in fits for name in fit.decay)))
    return Sign(
        f"A regularization or decay is added once for each of the batches that are applied together: {count}.",
        f"In {steps_in_words(fits)} the gradient of {names} is the reference's and a multiple of the weights; without it, what "
        f"is left is {max(fit.after for fit in fits):.1f} times the noise floor",
    )


def _changed(case: Case, optimizer: str, ratio: float, count: str) -> Sign | None:
    """The loss of a step agrees, and its gradients do not."""
    step = case.base.first_step("gradient", "weight")
    if (optimizer, step) not in case.explanation.unexplained and not any(
        (fit.optimizer, fit.step) == (optimizer, step) for fit in case.explanation.weighted
    ):
        return None
    assert step is not None
    pairs = case.base.runs.pairs(optimizer)
    here, there = (objective(one) for one in pairs[step])
    if here is None or not there or min(abs(here / there - 1), abs(here / there / ratio - 1)) > ROUND:
        return None
    again = case.switched("no-clipping") if case.facts.clips else None
    told = f"In step {step} the loss agrees, and the gradients that enter the optimizer do not"
    if again is not None and again.is_equivalent_but_for_kinks:
        case.rebase(again, "no-clipping")
        told += "; with clipping switched off in both runs all that was compared agrees"
    else:
        case.cut(step, "the batches that are applied together are changed one by one")
    return Sign(
        "Each of the batches that are applied together is changed for itself (clipped, normalized) before they are added up: "
        f"{count}.",
        told,
    )


ACCUMULATION = Cause(
    code="accumulation",
    title="what is done to each accumulated batch",
    meaning="The gradients of several batches are added up before one update (accumulation), and on more replicas a step needs "
    "fewer batches for the same rows. What is done once for each batch then depends on their number: clipping, "
    "normalizing or decaying each batch's gradient, or adding up means without dividing by the number of batches.",
    evidence="A step applies other numbers of batches than on one device, of the same rows; its gradients are the reference's "
    "times the ratio of these numbers, or with another multiple of the weights, or differ although the loss agrees.",
    fix="Divide by the rows of all batches that are applied together, and clip and decay what is applied, once:\n"
    "    # each batch; its gradients are added to the totals\n"
    "    loss = tf.reduce_sum(per_example_loss) / ROWS_OF_A_STEP\n"
    "    # when all are there\n"
    "    totals = context.all_reduce(tf.distribute.ReduceOp.SUM, totals)\n"
    "    totals, _ = tf.clip_by_global_norm(totals, LIMIT)\n"
    "    grads = [total / context.num_replicas_in_sync for total in totals]\n"
    "    optimizer.apply_gradients(zip(grads, variables))\n"
    "or gpudist_core.TrainStep(..., accumulate=BATCHES, clip_global_norm=LIMIT), which does that.",
    search=_search,
)
