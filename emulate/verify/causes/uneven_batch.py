"""Detect replicas with fewer examples (or fewer that count) but the same weight as the others."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers, steps_in_words
from emulate.verify.causes.padding import is_padded_otherwise
from emulate.verify.causes.text import GENERAL
from emulate.verify.compared_runs import complete
from emulate.verify.fit import Fit
from emulate.verify.lines import made, operations


def _search_uneven(case: Case) -> Sign | None:
    fits = case.explanation.uneven
    if not fits:
        return None
    case.explain_fits(fits)
    first = fits[0]
    rows = _rows(case, first)
    if case.has("empty-shard") and all(0 in _rows(case, fit) for fit in fits):
        return None  # the same division, by none
    return Sign(
        (
            f"Replicas with fewer examples weigh as much as the others: in step {first.step} the replicas have "
            f"{numbers(rows)} examples."
        ),
        (
            f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with "
            f"each replica weighted by its share of the examples the remaining error is {max(fit.after for fit in fits):.1f}x "
            "the noise floor"
        )
        + _even_steps(case, fits),
        _OF_FIT if case.facts.compiled else None,
    )


def _rows(case: Case, fit: Fit) -> list[int]:
    step = complete(case.base.runs.topology, fit.optimizer)[fit.step]
    return [len(local.rows or ()) for _, local in sorted(step.items())]


def _even_steps(case: Case, fits: tuple[Fit, ...]) -> str:
    before = fits[0].step
    return (
        f"; the {before} steps before it, with equally many examples on each replica, agree"
        if before and case.base.first_step("gradient") == before
        else ""
    )


def _search_weighted(case: Case) -> Sign | None:
    fits = case.explanation.weighted
    if not fits or (case.has("clip-before-reduce") and not case.without("no-clipping")):
        return None
    first = fits[0]
    shares = numbers([f"{share:.3f}" for _, share in sorted(first.shares.items())])
    if not case.are_counts(first):
        if case.lines.rows_meet or is_padded_otherwise(case, first.optimizer, first.step):
            return None  # examples meet before the loss: it is no function of the loss that each replica has
        case.explain_fits(fits)
        return Sign(
            (
                "Each replica's gradient has its own factor, and no count explains it: each replica computes a function "
                "of its own loss (a root, a logarithm, a ratio) instead of the loss of the whole batch."
            ),
            (
                f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with "
                f"the replicas weighted by {shares} the remaining error is {max(fit.after for fit in fits):.1f}x the noise "
                f"floor for all variables. Weights of a count would add up to {len(first.shares)}; these do not"
            ),
            [_OF_ALL, *[_COMPILED] * bool(case.facts.compiled), *[_OF_A_MEAN] * bool(case.facts.distributed)],
        )
    case.explain_fits(fits)
    return Sign(
        "Each replica divides its loss by its own count (tokens, mask, weights) instead of the count over all replicas.",
        (
            f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with the "
            f"replicas weighted by {shares} the remaining error is {max(fit.after for fit in fits):.1f}x the noise "
            "floor for all variables; every replica has equally many examples"
        ),
        _fix(case),
    )


def _fix(case: Case) -> Sequence[str] | None:
    """Return the fixes for programs that cannot simply divide by the count over all replicas."""
    if case.facts.distributed or case.facts.train_steps:
        return [_OF_CORE]
    return [GENERAL, _COMPILED] if case.facts.compiled else None


def _behind(case: Case) -> Sign | None:
    """Check for a part of the loss where no other part reaches: a tensor whose gradient needs a weight for each replica."""
    parts = {name: fit for name, fit in case.parts.items() if _is_apart(fit) and case.are_counts(fit)}
    if not parts:
        return None
    fit = max(parts.values(), key=lambda part: part.before)
    shares = numbers([f"{share:.3f}" for _, share in sorted(fit.shares.items())])
    return Sign(
        "Each replica divides a part of its loss by its own count instead of the count over all replicas.",
        (
            f"For {names_in_words(list(parts))} the sum of the replicas' gradients is up to {100 * fit.before:.3g}% off (L2) "
            f"in step {fit.step}; with the replicas weighted by {shares} the remaining error is "
            f"{max(part.after for part in parts.values()):.1f}x "
            "the noise floor; variables that other parts of the loss reach too have no such weights"
        ),
        _fix(case),
    )


def _is_apart(fit: Fit) -> bool:
    """Return whether replicas have different weights: one weight for all has another cause (a norm of all gradients)."""
    return bool(fit.shares) and max(fit.shares.values()) - min(fit.shares.values()) > _APART


_APART = 3e-3
_OF_ALL = "If the loss is a function of the whole batch"
_COMPILED = "With Keras compile"
_OF_FIT = "With Keras fit"
_OF_A_MEAN = "If the loss is a function of the whole batch, with gd.distributed"
_OF_CORE = "With gpudist_core"

UNEVEN_BATCH = Cause(
    "uneven-batch",
    _search_uneven,
    blame=(
        operations("loss", "mean", "scale", "ratio"),
        made("examples", "batch"),
    ),
)

LOCAL_NORMALIZATION = Cause(
    "local-normalization", _search_weighted, behind=_behind, blame=(operations("loss", "count", "mean", "ratio"),)
)
