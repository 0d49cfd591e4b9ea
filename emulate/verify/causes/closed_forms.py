"""Tell causes by closed forms of recorded gradients: a factor, shares of the rows, multiples of the weights, a count.

What fits is in `emulate/verify/arithmetic.py`; here it gets its name. One weight for each replica, which fits nearly anything,
is taken last, and only where each replica has a function of its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from emulate.verify.arithmetic import ROUND, Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import GENERAL, Sign, as_factor, names_in_words, numbers, steps_in_words
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import aligned, names_of, norm, objective, weight_of, weights_before
from emulate.verify.lines import between, operations


def _fits(case: Case, *, replicated: bool) -> list[Fit]:
    """Return the steps that one factor explains, of each optimizer that has one: each divides its own loss."""
    found = [fit for fit in case.explain_gradients().scaled if fit.replicated == replicated]
    by_optimizer = [[fit for fit in found if fit.optimizer == name] for name in case.base.runs.optimizers]
    return [fit for fits in by_optimizer if _have_one_factor(case, fits) for fit in fits]


def _have_one_factor(case: Case, fits: Sequence[Fit]) -> bool:
    if not fits or any(abs(fit.scale / fits[0].scale - 1) > _near(case) for fit in fits):
        return False
    # A factor without a meaning that a few numbers of one step have may be anything, and one of nearly 1 is no divisor's.
    is_seen = fits[0].elements >= _MANY and abs(fits[0].scale - 1) > ROUND
    return len(fits) > 1 or is_seen or factor_in_words(case, fits[0].scale)[1]


def _near(case: Case) -> float:
    """Return how close two factors must be to count as equal; 16-bit rounding shows them less exactly."""
    return _ROUND_OF_16_BITS if case.facts.casts else ROUND


def factor_in_words(case: Case, scale: float) -> tuple[str, bool]:
    """Describe a factor in words, and return whether it is the number of replicas or its inverse."""
    replicas, near = case.num_replicas, _near(case)
    if abs(scale / replicas - 1) < near:
        return f"{scale:.4g}x too large: the number of replicas is {replicas}", True
    if abs(scale * replicas - 1) < near:
        return f"{1 / scale:.4g}x too small: the number of replicas is {replicas}", True
    return f"{scale:.4g}x the gradient of one device", False


def of_a_factor(case: Case) -> Sign | None:
    """Look for one factor of all gradients."""
    fits = _fits(case, replicated=False)
    # One device that gets the number of replicas divides its loss by it, which is told.
    if not fits or case.without("told"):
        return None
    scales = {fit.optimizer: fit.scale for fit in reversed(fits)}  # the first of each
    scale = fits[0].scale
    mixed = any(fit.decay or fit.shares for fit in fits)
    off = {p.step: p.measure.error for p in case.base.objectives if p.measure.key.optimizer in {fit.optimizer for fit in fits}}

    def follows(point: Point) -> bool:
        """Return whether a report is off by the factor, or as a sum of losses by as much as the one that has it."""
        by = off.get(point.step, 0.0)
        is_off_by_it = by > 0 and abs(point.measure.error / by - 1) < 10 * ROUND
        return mixed or is_off_by_it or any(abs(point.factor / one - 1) < 10 * ROUND for one in scales.values())

    evidence = (
        f"sum of the replicas' gradients / gradient of one device = {_in_turn(scales, as_factor)} for all variables in "
        f"{steps_in_words(fits)}; after dividing by it the remaining error is {max(fit.after for fit in fits):.1f}x "
        "the noise floor"
    )
    apart = [name for fit in fits for name in fit.decay if _stands_apart(fit)]
    if apart:
        names = names_in_words(list(dict.fromkeys(apart)))
        evidence += f" (a regularization term of {names} is not scaled with the loss, which is right)"
    hidden = ". The weights hardly show it: this optimizer divides the factor out again"
    evidence += hidden if _is_hidden(case, fits[0]) else ""
    words = _in_turn(scales, lambda one: factor_in_words(case, one)[0])
    whose = f" of {names_in_words(sorted(scales))}" if len(scales) < len(case.base.runs.optimizers) else ""
    alike = _is_added_up(case, fits)
    evidence += ". Every replica takes its gradient from the same number, the loss of one device" if alike else ""
    return Sign(
        f"Every gradient{whose} is {words}.",
        evidence,
        _OF_A_SUM if alike else fix_of_factor(case, scale),
        # Where the losses agree, their gradients do, and what the program makes of these has the factor.
        blame=[operations("sum", "averages")] * (scale < 1)
        + [operations("given", "scale"), between("given")] * case.losses_agree([fits[0].step]),
        tensors=_trained_by(case, scales),
        then=lambda: case.explain_fits(fits, follows),
    )


def _trained_by(case: Case, optimizers: Collection[str]) -> list[str]:
    """Return the names of the variables that some optimizers train."""
    first = [complete(case.base.runs.reference, name)[:1] for name in sorted(optimizers)]
    return [tensor for steps in first for step in steps for tensor in names_of(step)]


def _in_turn(scales: Mapping[str, float], told: Callable[[float], str]) -> str:
    """Return what is told of the one factor, or of each optimizer's."""
    by_words: dict[str, list[str]] = {}
    for optimizer, scale in sorted(scales.items()):
        by_words.setdefault(told(scale), []).append(optimizer)
    if len(by_words) == 1:
        return next(iter(by_words))
    return "; ".join(f"{words} ({' and '.join(optimizers)})" for words, optimizers in by_words.items())


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


def fix_of_factor(case: Case, scale: float) -> str | None:
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


def of_equal_gradients(case: Case) -> Sign | None:
    """Look for gradients that are equal on all replicas before they are summed: the program has summed them already."""
    fits = _fits(case, replicated=True)
    if not fits or (case.ledger is not None and case.ledger.identical_replicas):
        return None
    evidence = (
        "The gradients that enter the optimizer are bit for bit equal on all replicas, although the examples "
        f"differ ({steps_in_words(fits)}); their sum is {as_factor(fits[0].scale)}x the gradient of one device"
    )
    if fits[0].scale < 1:
        return Sign(
            "The gradients are divided by the number of replicas twice, in the program and where they are averaged: "
            f"{1 / fits[0].scale:.4g}x too small.",
            evidence,
            _TOO_SMALL,
            then=lambda: case.explain_fits(fits),
        )
    summary = f"The gradients are summed twice, in the program and by the optimizer: {fits[0].scale:.4g}x too large."
    return Sign(summary, evidence, then=lambda: case.explain_fits(fits))


def of_shares_of_rows(case: Case) -> Sign | None:
    """Look for replicas with fewer examples that weigh as much as the others."""
    fits = case.explain_gradients().uneven
    if not fits:
        return None
    first = fits[0]
    rows = _examples_of_replicas(case, first)
    if case.has("empty-shard") and all(0 in _examples_of_replicas(case, fit) for fit in fits):
        return Sign(then=lambda: case.explain_fits(fits))  # the same division, by none
    are_even_before = first.step > 0 and case.base.first_step("gradient") == first.step
    even = f"; the {first.step} steps before it, with equally many examples on each replica, agree"
    return Sign(
        f"Replicas with fewer examples weigh as much as the others: in step {first.step} the replicas have "
        f"{numbers(rows)} examples.",
        (
            f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with "
            f"each replica weighted by its share of the examples the remaining error is {max(fit.after for fit in fits):.1f}x "
            "the noise floor"
        )
        + (even if are_even_before else ""),
        _OF_FIT if case.facts.compiled else None,
        then=lambda: case.explain_fits(fits),
    )


def _examples_of_replicas(case: Case, fit: Fit) -> list[int]:
    step = complete(case.base.runs.topology, fit.optimizer)[fit.step]
    return [len(local.rows or ()) for _, local in sorted(step.items())]


def of_multiples_of_weights(case: Case) -> Sign | None:
    """Look for a regularization term that counts too often, or too little."""
    fits = tuple(fit for fit in case.explain_gradients().fits if fit.decay and not _stands_apart(fit))
    regularized = set(case.facts.regularized)  # layers with regularizers, if there are some
    is_of_others = regularized and fits and not regularized & set(fits[0].decay)
    if not fits and _is_scaled_with_the_losses(case):
        return Sign(
            "A regularization term counts too often, as the losses of the examples do: every replica adds all of it, and the "
            "gradients are summed.",
            f"Every gradient is {factor_in_words(case, case.num_replicas)[0]}, and the loss has a term that no example enters. "
            "If the losses of the examples alone are divided by the global batch, this term stays too large",
        )
    if not fits or is_of_others or not _is_steady(fits):
        return None
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
        then=lambda: case.explain_fits(fits),
    )


def _is_scaled_with_the_losses(case: Case) -> bool:
    """Return whether the loss has a term of the weights alone, and each replica takes the mean of its own examples' losses."""
    fits = _fits(case, replicated=False)
    if not case.has("loss-scaling") or not fits or case.facts.gathers or case.facts.joins or _is_added_up(case, fits):
        return False
    are_whole = all(abs(fit.scale / case.num_replicas - 1) < _near(case) and not (fit.shares or fit.decay) for fit in fits)
    is_in_the_loss = not case.losses_agree([fits[0].step])
    return are_whole and is_in_the_loss and any("penalty" in record["roles"] for record in case.lines.of("loss"))


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


def of_a_count(case: Case) -> Sign | None:
    """Look for replicas' weights that are parts of one count."""
    fits = weighted(case)
    if not fits or not case.are_counts(fits[0]):
        return None
    return Sign(
        OF_A_COUNT,
        f"{_with_weights(fits)}; every replica has equally many examples",
        fix_of_count(case),
        tensors=_trained_by(case, {fit.optimizer for fit in fits}),
        then=lambda: case.explain_fits(fits),
    )


def of_own_losses(case: Case) -> Sign | None:
    """Look for any other weight of each replica: a function of its loss has it."""
    fits = weighted(case)
    # Where examples meet before the loss, it is no function of the loss that each replica has.
    if not fits or case.lines.rows_meet or is_padded_otherwise(case, fits[0].optimizer, fits[0].step):
        return None
    return Sign(
        "Each replica's gradient has its own factor, and no count explains it: each replica computes a function of its own "
        "loss (a root, a logarithm, a ratio) instead of the loss of the whole batch.",
        f"{_with_weights(fits)}. Weights of a count would add up to {len(fits[0].shares)}; these do not",
        [_OF_ALL, *[COMPILED] * bool(case.facts.compiled), *[_OF_ALL_IN_A_MEAN] * bool(case.facts.distributed)],
        then=lambda: case.explain_fits(fits),
    )


def weighted(case: Case) -> list[Fit]:
    """Return the steps with a weight for each replica that nothing else explains: uneven rows have other weights besides.

    What the weights of replicas and a regularization explain together has two causes.
    """
    uneven = case.ledger.uneven if case.ledger is not None and case.has("uneven-batch") else ()
    left, fits = _steps_left(case), case.explain_gradients().weighted
    return [f for f in fits if f.step not in uneven and (f.taped or f.decay or (f.optimizer, f.step) in left)]


def _steps_left(case: Case) -> set[tuple[str, int]]:
    """Return the steps, by optimizer, whose gradients differ without a cause so far."""
    return {(point.measure.key.optimizer, point.step) for point in case.left() if point.measure.key.kind == "gradient"}


def _with_weights(fits: Sequence[Fit]) -> str:
    return (
        f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * fits[0].before:.3g}% off (L2); with the "
        f"replicas weighted by {weights_in_words(fits[0])} the remaining error is {max(fit.after for fit in fits):.1f}x the "
        "noise floor for all variables"
    )


def weights_in_words(fit: Fit) -> str:
    """Return each replica's weight."""
    return numbers([f"{share:.3f}" for _, share in sorted(fit.shares.items())])


def fix_of_count(case: Case) -> Sequence[str] | None:
    """Return the fixes for programs that cannot simply divide by the count over all replicas."""
    if case.facts.distributed or case.facts.train_steps:
        return [_OF_CORE]
    return [GENERAL, COMPILED] if case.facts.compiled else None


def is_padded_otherwise(case: Case, optimizer: str, step: int) -> bool:
    """Return whether the examples of a step have other lengths than on one device: each host fills up its own batches."""
    steps = [of_all for trace in (case.plain, case.untouched) for of_all in complete(trace, optimizer)[step : step + 1]]
    lengths = [
        {(place, array.shape[1:]) for local in of_all.values() for place in local.row_inputs if (array := local.inputs[place])}
        for of_all in steps
    ]
    return any(shapes != lengths[0] for shapes in lengths)


_MANY = 16
"""So many elements beyond the noise floor do not have one factor by accident."""
_GROWS = "If the batch grows with the number of replicas"
_OF_A_MEAN = "With gd.distributed"
_OF_ROWS = "With gd.TrainStep"
_OF_ALL_ROWS = "If the loss covers the examples of all replicas"
_OF_A_SUM = "If the loss is summed over the replicas inside the tape"
_TOO_SMALL = "If the gradients are too small"
_FEWEST = 3
"""Steps it takes to believe that replicas have one loss."""
_ROUND_OF_16_BITS = 1e-2
_HIDDEN = 0.05
"""Fraction of a step: below this distance the weights hide a factor."""
OF_A_COUNT = "Each replica divides its loss by its own count (tokens, mask, weights) instead of the count over all replicas."
_OF_ALL = "If the loss is a function of the whole batch"
_OF_ALL_IN_A_MEAN = "If the loss is a function of the whole batch, with gd.distributed"
COMPILED = "With Keras compile"
_OF_FIT = "With Keras fit"
_OF_CORE = "With gpudist_core"
