"""Tell causes by experiments: what must see the whole batch for the replicas to have the gradients of one device.

`emulate/evaluate/joins.py` makes the experiments. Their answer is the smallest set of tensors that is enough; here its members
get the names of causes, one for each kind of member. No number is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from emulate.verify.case import Case
from emulate.verify.causes.cause import Sign, as_factor, names_in_words
from emulate.verify.causes.closed_forms import (
    COMPILED,
    OF_A_COUNT,
    factor_in_words,
    fix_of_count,
    fix_of_factor,
    is_padded_otherwise,
    weighted,
    weights_in_words,
)
from emulate.verify.causes.replays import DEPENDENT, OF_PADDING, rebase_on_any_replay
from emulate.verify.joins import Joins, Member
from emulate.verify.lines import Blame, located, making

_KINDS = {
    "sum": "the sum",
    "count": "the count",
    "mean": "the mean",
    "number": "the number of examples",
    "maximum": "the maximum",
    "minimum": "the minimum",
    "rows": "the rows",
    "constant": "the number",
    "other": "the result",
}


def of_a_factor(case: Case) -> Sign | None:
    """Look for a factor that is left where what must see the whole batch does."""
    joins = _answer(case)
    if joins.scale == 1:
        return None
    words, _ = factor_in_words(case, joins.scale)
    fix = _OF_ONE_NUMBER if joins.meetings and joins.scale > 1 else fix_of_factor(case, joins.scale)
    return Sign(
        f"Beside what must see the whole batch, every gradient is {words}.",
        f"{said_by_joins(case, joins.members)}, after dividing by {as_factor(joins.scale)}",
        fix,
        then=_explained(case),
    )


def of_constants(case: Case) -> Sign | None:
    """Look for numbers that a replica has in another way than one device: a fix of other members may change them, too."""
    joins = _answer(case)
    if not joins.constants or len(joins.constants) < len(joins.members):
        return None
    return Sign(
        f"The step uses the number of replicas ({case.num_replicas}) for more than dividing the loss. The same examples and "
        "weights get different gradients with more replicas.",
        said_by_joins(case, joins.constants),
        blame=lines_of(joins.constants),
        then=_explained(case),
    )


def of_numbers(case: Case) -> Sign | None:
    """Look for numbers of examples by which a part of the loss is divided."""
    numbers = _answer(case).numbers
    if not numbers:
        return None
    return Sign(
        "A part of the loss is scaled by the number of replicas: each replica divides it by the number of its own examples.",
        said_by_joins(case, numbers),
        blame=lines_of(numbers),
        then=_explained(case),
    )


def of_terms(case: Case) -> Sign | None:
    """Look for terms that depend on no example."""
    joins = _answer(case)
    if not joins.terms:
        return None
    return Sign(
        "A term of the loss that depends on no example counts once for each replica.",
        f"In step {joins.step} the replicas' examples have the gradients of one device if this term counts once",
        blame=(making("loss", joins.terms),),
        then=_explained(case),
    )


def of_normalizers(case: Case) -> Sign | None:
    """Look for what examples make without the model, and what other examples are divided by: counts, sums of weights."""
    joins = _answer(case)
    normalizers = joins.normalizers
    if not normalizers:
        return None
    fits = weighted(case)
    counts = fits[0] if fits and case.are_counts(fits[0]) else None
    how, then = said_by_joins(case, normalizers), _explained(case)
    if counts is not None and len(normalizers) + len(joins.constants) == len(joins.members):
        then = partial(case.explain_fits, fits)
    if {member.kind for member in normalizers} & {"maximum", "minimum"}:
        fix: Sequence[str] | None = [_OF_EXTREMES]
    else:
        fix = [_BEFORE_IT_IS_USED, *[COMPILED] * bool(case.facts.compiled)] if counts is None else fix_of_count(case)
    if counts is None:
        what = (
            "Each replica scales its loss by a number that it computes from its own examples, instead of from those of all "
            "replicas."
        )
        return Sign(what, how, fix, blame=lines_of(normalizers), then=then)
    how = f"{how}. The replicas' gradients need the weights {weights_in_words(counts)}"
    return Sign(OF_A_COUNT, how, fix, blame=lines_of(normalizers), then=then)


def of_meetings(case: Case) -> Sign | None:
    """Look for everything else by which the loss of one example depends on others."""
    joins = _answer(case)
    if not joins.meetings:
        return None
    # A product that sums over the examples is seldom meant.
    are_sums = all(member.kind in ("sum", "mean") and member.operation in ("Sum", "Mean") for member in joins.meetings)
    are_padded = is_padded_otherwise(case, joins.optimizer, joins.step)
    return Sign(
        DEPENDENT,
        said_by_joins(case, joins.meetings),
        OF_PADDING if are_padded else _OF_SUMS if are_sums else None,
        blame=lines_of(joins.meetings),
        then=_explained(case),
    )


def _answer(case: Case) -> Joins:
    """Return the answer of the experiments, which was asked for before."""
    assert case.joins is not None
    return case.joins


def _explained(case: Case) -> Callable[[], object]:
    """Return what judges on a replay from the step on that experiments explain: all that they name goes together."""
    joins = _answer(case)

    def then() -> None:
        if joins not in case.joined:
            case.joined.append(joins)
            rebase_on_any_replay(case, joins.step)

    return then


def said_by_joins(case: Case, members: Sequence[Member]) -> str:
    """Return what experiments say of some members, in words."""
    joins = _answer(case)
    whats = list(dict.fromkeys(f"{_KINDS[member.kind]} ({_place(case, member)})" for member in members))
    alone = all(member.value_alone for member in members)
    others = [member for member in joins.members if member not in members]
    with_others = "".join(dict.fromkeys(f", and {_KINDS[one.kind]} ({_place(case, one)}) as on one device" for one in others))
    return (
        f"In step {joins.step} the replicas' examples have the gradients of one device if each replica gets "
        f"{names_in_words(whats, 3)} of the whole batch{with_others}; "
        + ("the value alone is enough" if alone else "gradients must pass through it, too")
    )


def _place(case: Case, member: Member) -> str:
    line = next(iter(located(case.lines.making([member.name]))), None)
    return member.operation if line is None else f"{member.operation}, {line.place}"


def lines_of(members: Sequence[Member]) -> Sequence[Blame]:
    """Return where the lines of members are looked for."""
    return (making("loss", [name for member in members for name in (*member.behind, member.name)]),)


_OF_EXTREMES = "If it is a largest or smallest value"
_BEFORE_IT_IS_USED = "If the count is changed before it is used"
_OF_ONE_NUMBER = "If the loss of a replica is one number"
_OF_SUMS = "If sums over the batch make the loss"
