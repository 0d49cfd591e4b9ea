"""Detect a loss divided by the wrong number, terms that count too often, and gradients that are summed twice."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.verify.arithmetic import ROUND, Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, as_factor, names_in_words, steps_in_words
from emulate.verify.causes.joined import explain_by_joins, lines_of
from emulate.verify.causes.sequential_replay import rebase_on_replay
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import aligned, names_of, norm, objective, weight_of, weights_before
from emulate.verify.joins import Joins, Member
from emulate.verify.lines import between, making, operations

_FIXES = "If the term has another form"


def _search_regularization(case: Case) -> Sign | None:
    fits = tuple(fit for fit in case.explain_gradients().fits if fit.decay and not _stands_apart(fit))
    if case.has("accumulation"):
        return None
    regularized = set(case.facts.regularized)  # layers with regularizers, if there are some
    if not fits or not _is_steady(fits) or (regularized and not regularized & set(fits[0].decay)):
        return _of_each_replica(case)
    case.explain_fits(fits)
    first = fits[0]
    tensors = list(first.decay)
    l2, l1 = first.decay[tensors[0]]
    term = " + ".join(filter(None, (f"{l2:.4g} * w" if l2 else "", f"{l1:.4g} * sign(w)" if l1 else "")))
    size = l2 or l1
    on = "1 variable" if len(tensors) == 1 else f"{len(tensors)} variables"
    # Each of N replicas that adds all of the term makes N - 1 times 2 * l2 * w too much.
    l2_alone = l2 / 2 / (case.num_replicas - 1) if l2 > 0 else 0.0
    coefficient = f". That is L2 with a coefficient of {l2_alone:.3g}, added {case.num_replicas} times instead of once"
    return Sign(
        f"A regularization term of {names_in_words(tensors)} counts too {'often' if size > 0 else 'little'}: every replica "
        f"{'adds all of it, and the gradients are summed' if size > 0 else 'divides it too often'}.",
        f"{steps_in_words(fits)}: the error of the gradients is {term} ({tensors[0]}), on {on}; the others agree; "
        f"without it the remaining error is {max(fit.after for fit in fits):.1f}x the noise floor"
        + (coefficient if l2 > 0 else ""),
    )


def _of_each_replica(case: Case) -> Sign | None:
    """Check for a term of any form that is added once for each replica, or is divided by their number."""
    if case.joins is not None:
        return _of_terms(case, case.joins)
    first = case.find_first_unexplained()
    if first is None:
        return None
    agrees = rebase_on_replay(case, first, grouping_matters=False)
    if agrees is None:
        return None
    return Sign(
        "A part of the loss counts once for each replica, or is divided by the number of replicas: a term "
        "without examples, a mean over the replica's own examples, or, where Keras divides the losses, a sum "
        "over examples.",
        f"The gradients differ from step {first} on; {agrees}",
        _FIXES,
    )


def _of_terms(case: Case, joins: Joins) -> Sign | None:
    if not joins.terms:
        return None
    explain_by_joins(case, ())
    return Sign(
        "A term of the loss that depends on no example counts once for each replica.",
        f"In step {joins.step} the replicas' examples have the gradients of one device if this term counts once",
        blame=(making("loss", joins.terms),),
    )


def _stands_apart(fit: Fit) -> bool:
    """Return whether the loss has a wrong scale and the regularization term, which is right, has not."""
    is_off = abs(fit.factor - 1) > ROUND
    return is_off and all((l2 or l1) * (fit.factor - 1) > 0 for l2, l1 in fit.decay.values())


def _is_steady(fits: tuple[Fit, ...]) -> bool:
    """Return whether a term has the same size in every step."""
    sizes = [dict(fit.decay) for fit in fits]
    first = sizes[0]
    return all(
        abs(a - b) <= 0.01 * max(abs(a), abs(b), 1e-30)
        for decay in sizes
        for name, pair in decay.items()
        if name in first
        for a, b in zip(pair, first[name], strict=True)
    )


REGULARIZATION = Cause(
    "regularization-per-replica",
    _search_regularization,
    blame=(operations("loss", "penalty"), operations("given", "penalty"), between("given")),
)


_MANY = 16
"""So many elements beyond the noise floor do not have one factor by accident."""
_GROWS = "If the batch grows with the number of replicas"
_ONCE_TOO_OFTEN = "If the gradients are too small"
_OF_A_MEAN = "With gd.distributed"
_OF_ROWS = "With gd.TrainStep"
_OF_ALL_ROWS = "If the loss covers the examples of all replicas"
_OF_A_SUM = "If the loss is summed over the replicas inside the tape"
_OF_ONE_NUMBER = "If the loss of a replica is one number"
_TOO_SMALL = "If the gradients are too small"
_FEWEST = 3
"""Steps it takes to believe that replicas have one loss."""
_ROUND_OF_16_BITS = 1e-2
_HIDDEN = 0.05
"""Fraction of a step: below this distance the weights hide a factor."""


def _fits(case: Case, *, replicated: bool) -> list[Fit]:
    fits = [fit for fit in case.explain_gradients().scaled if fit.replicated == replicated]
    if not fits or any(abs(fit.scale / fits[0].scale - 1) > _near(case) for fit in fits):
        return []
    # A factor without a meaning that a few numbers of one step have may be anything, and one of nearly 1 is no divisor's.
    is_seen = fits[0].elements >= _MANY and abs(fits[0].scale - 1) > ROUND
    is_sure = len(fits) > 1 or is_seen or _describe(case, fits[0].scale)[1]
    return fits if is_sure else []


def _near(case: Case) -> float:
    """Return how close two factors must be to count as equal; 16-bit rounding shows them less exactly."""
    return _ROUND_OF_16_BITS if case.facts.casts else ROUND


def _describe(case: Case, scale: float) -> tuple[str, bool]:
    """Describe a factor in words, and return whether it is the number of replicas or its inverse."""
    replicas, near = case.num_replicas, _near(case)
    if abs(scale / replicas - 1) < near:
        return f"{scale:.4g}x too large: the number of replicas is {replicas}", True
    if abs(scale * replicas - 1) < near:
        return f"{1 / scale:.4g}x too small: the number of replicas is {replicas}", True
    return f"{scale:.4g}x the gradient of one device", False


def _search_scaling(case: Case) -> Sign | None:
    fits = _fits(case, replicated=False)
    if case.has("accumulation"):
        return None
    if not fits and case.joins is not None:
        return _beside_joins(case, case.joins)
    if not fits:
        return _drowned(case)
    scale = fits[0].scale
    mixed = any(fit.decay or fit.shares for fit in fits)
    off = {p.step: p.measure.error for p in case.base.objectives if p.measure.key.optimizer in {fit.optimizer for fit in fits}}

    def follows(point: Point) -> bool:
        """Return whether a report is off by the factor, or as a sum of losses by as much as the one that has it."""
        by = off.get(point.step, 0.0)
        is_off_by_it = by > 0 and abs(point.measure.error / by - 1) < 10 * ROUND
        return mixed or abs(point.factor / scale - 1) < 10 * ROUND or is_off_by_it

    case.explain_fits(fits, follows)
    words, _ = _describe(case, scale)
    evidence = (
        f"sum of the replicas' gradients / gradient of one device = {as_factor(scale)} for all variables in "
        f"{steps_in_words(fits)}; after dividing by it the remaining error is {max(fit.after for fit in fits):.1f}x "
        "the noise floor"
    )
    apart = [name for fit in fits for name in fit.decay if _stands_apart(fit)]
    if apart:
        names = names_in_words(list(dict.fromkeys(apart)))
        evidence += f" (a regularization term of {names} is not scaled with the loss, which is right)"
    hidden = ". The weights hardly show it: this optimizer divides the factor out again"
    evidence += hidden if _is_hidden(case, fits[0]) else ""
    whose = f" of {fits[0].optimizer}" if len(case.base.runs.optimizers) > 1 else ""
    alike = _is_added_up(case, fits)
    evidence += ". Every replica takes its gradient from the same number, the loss of one device" if alike else ""
    return Sign(
        f"Every gradient{whose} is {words}.",
        evidence,
        _OF_A_SUM if alike else _fix(case, scale),
        blame=[operations("sum", "averages")] if scale < 1 else (),
    )


def _is_added_up(case: Case, fits: Sequence[Fit]) -> bool:
    """Return whether replicas take gradients of one number that is a sum over the replicas."""
    if case.facts.gathers or case.facts.joins or case.ledger is None or not case.ledger.is_same:
        return False
    if any(abs(fit.scale / case.num_replicas - 1) > _near(case) for fit in fits):
        return False
    for fit in fits:
        ours, theirs = (complete(trace, fit.optimizer) for trace in (case.base.runs.topology, case.base.runs.reference))
        objectives = [{local.objective for local in step.values()} for step in ours]
        if len(ours) < _FEWEST or any(len(numbers) != 1 or None in numbers for numbers in objectives):
            return False  # in one step alone they may be equal by chance: of an untrained model, say
        (value,), right = objectives[fit.step], objective(theirs[fit.step])
        if value is None or right is None or abs(value - right) > ROUND * abs(right):
            return False
    return not case.ledger.identical_replicas


def _fix(case: Case, scale: float) -> str | None:
    """Return the fix for the way in which the program computes its loss; None for the general one."""
    if (case.facts.gathers or case.facts.joins) and abs(scale / case.num_replicas - 1) < _near(case):
        return _OF_ALL_ROWS
    if case.ledger is not None and case.ledger.grows:
        return _GROWS
    if case.facts.distributed:
        return _OF_A_MEAN
    if case.facts.train_steps:
        return _OF_ROWS
    return _TOO_SMALL if scale < 1 else None


def _beside_joins(case: Case, joins: Joins) -> Sign | None:
    """Report a factor that is left where what must see the whole batch does."""
    if joins.scale == 1:
        return None
    words, _ = _describe(case, joins.scale)
    how = explain_by_joins(case, joins.members)
    fix = _OF_ONE_NUMBER if joins.meetings and joins.scale > 1 else _fix(case, joins.scale)
    return Sign(
        f"Beside what must see the whole batch, every gradient is {words}.",
        f"{how}, after dividing by {as_factor(joins.scale)}",
        fix,
    )


def _drowned(case: Case) -> Sign | None:
    """Check whether the differentiated losses are off by a factor that the gradients' rounding hides."""
    drowned, losses = case.base.drowned_from, [point for point in case.base.objectives if point.exceeds]
    first = min((point.step for point in losses), default=0)
    trained = case.base.first_step("gradient", "weight")
    if drowned is None or not losses or first < drowned or (trained is not None and trained < first):
        return None
    at_first = next(point for point in losses if point.step == first)
    words, _ = _describe(case, at_first.factor)
    m = at_first.measure
    case.explain(lambda point: point.measure.key.kind in ("loss", "metric", "gradient", "weight") and point.step >= first)
    return Sign(
        f"The loss that is minimized is, from step {first} on, {words}.",
        f"The loss of step {first} is {m.in_print[0]}, summed over the replicas, and {m.in_print[1]} on one "
        f"device ({at_first.ratio:.0f}x the noise floor); from step {drowned} on the gradients have too much "
        "rounding error to show it",
    )


def _search_part(case: Case) -> Sign | None:
    """Check for a part of the loss that each replica divides by its own examples, beside others that are right."""
    if case.joins is not None:
        return _of_numbers(case, case.joins.numbers)
    first = case.find_first_unexplained()
    if first is None or not case.lines.depends_on_examples_alone:
        return None  # a term without examples may be what counts too often
    agrees = rebase_on_replay(case, first, grouping_matters=False)
    if agrees is None:
        return None
    return Sign(
        "A part of the loss is scaled by the number of replicas: each replica divides it by its own examples, or it is "
        "divided once more than the rest.",
        f"The gradients differ from step {first} on, by no common factor; every term of the loss depends on examples; {agrees}",
    )


def _of_numbers(case: Case, numbers: Sequence[Member]) -> Sign | None:
    if not numbers:
        return None
    how = explain_by_joins(case, numbers)
    return Sign(
        "A part of the loss is scaled by the number of replicas: each replica divides it by the number of its own examples.",
        how,
        blame=lines_of(numbers),
    )


def _is_hidden(case: Case, fit: Fit) -> bool:
    """Return whether the step changed the weights as the reference's did, in spite of the factor."""
    runs, apart, whole = case.base.runs, 0.0, 0.0
    if runs.reference.follows:
        return False  # it applies this run's gradients
    ours, theirs = (complete(trace, fit.optimizer)[fit.step] for trace in (runs.topology, runs.reference))
    for tensor in names_of(theirs):
        before = weights_before(runs.reference, fit.optimizer, fit.step, tensor)
        stored = [before, weight_of(ours, tensor), weight_of(theirs, tensor)]
        if None not in stored:
            start, own, other = aligned([array for array in stored if array is not None])
            apart += norm(own - other) ** 2
            whole += norm(other - start) ** 2
    return apart < _HIDDEN**2 * whole


def _search_twice(case: Case) -> Sign | None:
    fits = _fits(case, replicated=True)
    if not fits or (case.ledger is not None and case.ledger.identical_replicas):
        return None
    case.explain_fits(fits)
    evidence = (
        "The gradients that enter the optimizer are bit for bit equal on all replicas, although the examples "
        f"differ ({steps_in_words(fits)}); their sum is {as_factor(fits[0].scale)}x the gradient of one device"
    )
    if fits[0].scale < 1:
        return Sign(
            "The gradients are divided by the number of replicas twice, in the program and where they are averaged: "
            f"{1 / fits[0].scale:.4g}x too small.",
            evidence,
            _ONCE_TOO_OFTEN,
        )
    return Sign(
        f"The gradients are summed twice, in the program and by the optimizer: {fits[0].scale:.4g}x too large.", evidence
    )


LOSS_SCALING = Cause("loss-scaling", _search_scaling, blame=(operations("loss", "mean", "scale"),))

LOSS_SCALING_OF_A_PART = Cause("loss-scaling", _search_part, blame=(operations("loss", "mean", "scale"),))

DOUBLE_ALL_REDUCE = Cause(
    "double-all-reduce", _search_twice, blame=(operations("sum", "all_reduce"), operations("assigned", "assign"))
)
