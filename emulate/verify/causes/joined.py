"""Say of what experiments have found that it must see the whole batch, in the words of causes."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.verify.case import Case
from emulate.verify.causes.cause import names_in_words
from emulate.verify.causes.sequential_replay import rebase_on_any_replay
from emulate.verify.joins import Member
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


def explain_by_joins(case: Case, members: Sequence[Member]) -> str:
    """Judge on where experiments explain a step, and return what they say of some members, in words."""
    joins = case.joins
    assert joins is not None
    if joins not in case.joined:
        case.joined.append(joins)
        rebase_on_any_replay(case, joins.step)
    return said_by_joins(case, members)


def said_by_joins(case: Case, members: Sequence[Member]) -> str:
    """Return what experiments say of some members, in words."""
    joins = case.joins
    assert joins is not None
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
    return (making("loss", [member.name for member in members]),)
