"""Detect a regularization term that every replica adds in full."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, steps_in_words
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart
from emulate.verify.fit import ROUND, Fit
from emulate.verify.lines import between, operations

_FIXES = "If the term has another form"


def _search(case: Case) -> Sign | None:
    fits = tuple(fit for fit in case.explanation.decayed if not stands_apart(fit))
    if case.has("accumulation"):
        return None
    if not fits or not _is_steady(fits) or not _is_known(case, fits[0]):
        return _of_each_replica(case)
    case.explain_fits(fits)
    first = fits[0]
    tensors = list(first.decay)
    l2, l1 = first.decay[tensors[0]]
    size = l2 or l1
    on = "1 variable" if len(tensors) == 1 else f"{len(tensors)} variables"
    return Sign(
        f"A regularization term of {names_in_words(tensors)} counts too {'often' if size > 0 else 'little'}: every replica "
        f"{'adds all of it, and the gradients are summed' if size > 0 else 'divides it too often'}.",
        f"{steps_in_words(fits)}: the error of the gradients is {_term(l2, l1)} ({tensors[0]}), on {on}; the others agree; "
        f"without it the remaining error is {max(fit.after for fit in fits):.1f}x the noise floor"
        + _coefficient(l2, case.num_replicas),
    )


def _of_each_replica(case: Case) -> Sign | None:
    """Check for a term of any form that is added once for each replica, or is divided by their number."""
    first = case.first_unexplained
    if first is None:
        return None
    agrees = rebase_on_replicas_apart(case, first, grouping_matters=False)
    if agrees is None:
        return None
    return Sign(
        (
            "A part of the loss counts once for each replica, or is divided by the number of replicas: a term "
            "without examples, a mean over the replica's own examples, or, where Keras divides the losses, a sum "
            "over examples."
        ),
        f"The gradients differ from step {first} on; {agrees}",
        _FIXES,
    )


def stands_apart(fit: Fit) -> bool:
    """Return whether the loss has a wrong scale and the regularization term, which is right, has not."""
    is_off = abs(fit.factor - 1) > ROUND
    return is_off and all((l2 or l1) * (fit.factor - 1) > 0 for l2, l1 in fit.decay.values())


def _term(l2: float, l1: float) -> str:
    terms = [f"{l2:.4g} * w" if l2 else "", f"{l1:.4g} * sign(w)" if l1 else ""]
    return " + ".join(term for term in terms if term)


def _coefficient(l2: float, replicas: int) -> str:
    """Return the L2 coefficient if each of N replicas adds all of it: N - 1 times 2 * l2 * w too much."""
    return (
        f". That is L2 with a coefficient of {l2 / 2 / (replicas - 1):.3g}, added {replicas} times instead of once"
        if l2 > 0
        else ""
    )


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


def _is_known(case: Case, fit: Fit) -> bool:
    """Return whether at least one of the tensors belongs to layers with regularizers, if there are such layers."""
    return not case.facts.regularized or bool(set(case.facts.regularized) & set(fit.decay))


REGULARIZATION = Cause(
    "regularization-per-replica",
    _search,
    blame=(operations("loss", "penalty"), operations("given", "penalty"), between("given")),
)
