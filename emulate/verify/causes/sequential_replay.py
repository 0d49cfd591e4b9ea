"""Run one device on the examples of one replica after the other, to see what that alone explains."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from emulate.told import told
from emulate.verify.arithmetic import are_equal
from emulate.verify.case import Case
from emulate.verify.causes.cause import is_assigned
from emulate.verify.compare import Comparison, explains_up_to

REPLAY = "one device that processes the replicas one after the other (sequential replay)"
NOTE = told("sequential-replay")(
    "gpudist compared with a sequential replay: one device that processes the replicas one after the other. If it could not "
    'compare something, that is listed under "not compared"'
)

_SUMS = ("replicas-summed", "replicas")
_SUMS_AT_TAPES = ("replicas-taped", "replicas-taped-told", "replicas-taped-mean")
"""For a program that does more with gradients by itself than to hand them to an optimizer."""
_REPORTED = ("loss", "metric")


def is_possible(case: Case) -> bool:
    """Return whether one device can get the replicas' examples: those of one device, or a multiple by the replicas."""
    ledger = case.ledger
    return case.num_replicas > 1 and ledger is not None and (ledger.grows or ledger.first_apart in (None, ledger.num_steps))


def rebase_on_replay(case: Case, step: int, *, grouping_matters: bool = True) -> str | None:
    """Judge on a reference that computes as the replicas do, each for itself, where it explains a step's gradients.

    Args:
        case: The case; its base is that reference's comparison then.
        step: The first step whose gradients differ.
        grouping_matters: Whether it is to matter which rows are together on a replica. Where it does not, what comes once
            for each replica depends on no row.

    Returns:
        What agrees with it, in words; None where it does not explain them, or where grouping matters otherwise than asked.
    """
    way = _explaining(case, step)
    if way is None or _explains(case, f"{way.switch}-regrouped", step, way.first) == grouping_matters:
        return None
    agreement = _rebase(case, step, way)
    return agreement if grouping_matters else f"{agreement}, however the examples are grouped"


def rebase_on_any_replay(case: Case, step: int) -> None:
    """Judge on a reference that computes as the replicas do, each for itself; only up to a step where none is like them."""
    way = _explaining(case, step)
    if way is None:
        case.cut(step, "what each replica does with its own examples changes them")
    else:
        _rebase(case, step, way)


def rebase_where_turns_matter(case: Case, step: int) -> str | None:
    """Rebase if the order of replicas matters: what one does changes what the next one does.

    Args:
        case: As in `rebase_on_replay`.
        step: As there.

    Returns:
        What agrees with it, and what does not, in words; None where it does not explain the gradients, or turns do not matter.
    """
    way = _explaining(case, step)
    if way is None:
        return None
    backwards = f"{way.switch}-backwards"
    if _apart(case, backwards, step, way.first) is None or _explains(case, backwards, step, way.first):
        return None
    return f"{_rebase(case, step, way)}; in the reverse order of the replicas it does not"


def rebase_where_numbers_matter(case: Case, step: int) -> str | None:
    """Rebase if each replica's number matters.

    Args:
        case: As in `rebase_on_replay`.
        step: As there.

    Returns:
        What agrees with it, in words; None where it does not explain the gradients, or numbers do not matter.
    """
    if not is_possible(case) or not case.facts.numbered or _explaining(case, step) is not None:
        return None
    way = _explaining(case, step, "-numbered")
    return f"{_rebase(case, step, way)} only after it gets the number of each replica" if way is not None else None


@dataclass(frozen=True)
class _Replay:
    """Hold how one device on the replicas' examples must sum to explain a step; `first`: for the first update only."""

    switch: str
    first: bool
    comparison: Comparison


def _explaining(case: Case, step: int, kind: str = "") -> _Replay | None:
    if not is_possible(case):
        return None
    by_tapes = "tape" in case.topology.optimizers
    sums = (*_SUMS * (not by_tapes), *_SUMS_AT_TAPES * (by_tapes or bool(case.facts.clipped_by)))
    for switch, first in itertools.product(sums, _of_first_alone(case)):
        again = _apart(case, f"{switch}{kind}", step, first)
        if again is not None and explains_up_to(again, step, case.base):
            return _Replay(switch, first, again)
    return None


def _explains(case: Case, switch: str, step: int, first: bool) -> bool:
    return explains_up_to(_apart(case, switch, step, first), step, case.base)


def _rebase(case: Case, step: int, way: _Replay) -> str:
    again = way.comparison
    if not again.is_equivalent_but_for_kinks and again.first_step("initial-weight", "gradient", "weight", "variable") is None:
        again = replace(again, points=tuple(p for p in again.points if p.measure.key.kind not in _REPORTED))
        case.unreachable.append(_OTHER_REPORTS)
    if way.first:
        case.unreachable.append(_REPEATED.format(_first_out(case, step), step))
    case.clips_the_sum = way.switch in _SUMS_AT_TAPES or _adds_up_itself(case, step)
    case.rebase(again)
    case.notes.append(NOTE)
    agreement = "has the same gradients" if way.first else _agreement(again, has_reports=again is way.comparison)
    return f"{REPLAY} {agreement}"


def _adds_up_itself(case: Case, step: int) -> bool:
    """Return whether all replicas give the optimizers the same gradients of a step: the program has summed them before."""
    views = [view for name in case.base.runs.optimizers if case.base.steps[name] > step for view in case.base.views(name, step)]
    return bool(views) and all(are_equal(view.locals) for view in views)


_OTHER_REPORTS = told("replay-reports")("losses and metrics: the sequential replay reports them in a different way")
_REPEATED = told("first-update-only")(
    "everything except the gradients of {} up to step {}: a call of Strategy.run makes several updates, and a sequential "
    "replay can make only the first"
)


def _of_first_alone(case: Case) -> tuple[bool, ...]:
    """Return whether to check only the first update of a call.

    Where it makes several, from the second on gradients may depend on an update that all replicas make together, and one after
    the other cannot: with one optimizer they do, another may train something else.
    """
    if case.facts.repeated:
        return (True,)
    return (False, True) if len(case.topology.optimizers) > 1 else (False,)


def _apart(case: Case, switch: str, step: int, first: bool) -> Comparison | None:
    """Compare with one device on the examples of one replica after the other, for the first update of a call or all."""
    again = case.switch(switch, alone=True)
    if again is None:
        return None
    # What a step assigns itself, such as moving averages, one share after the other changes once for each share.
    trained = (p for p in again.points if not (is_assigned(case, p) or p.measure.key.tensor in case.facts.batchnorm))
    again = replace(again, points=tuple(trained))
    if not first:
        return again
    optimizer = _first_out(case, step)
    kept = tuple(p for p in again.points if p.measure.key.optimizer == optimizer and p.step <= step)
    return replace(again, points=kept, objectives=())


def _first_out(case: Case, step: int) -> str:
    """Return the optimizer whose gradients differ in a step; of several the first unexplained one."""
    unexplained = {name for name, k in case.explain_gradients().unexplained if k == step}
    return next((name for name in case.topology.optimizers if name in unexplained), None) or next(
        p.measure.key.optimizer for p in case.base.exceeding if p.measure.key.kind == "gradient" and p.step == step
    )


def _agreement(again: Comparison, *, has_reports: bool) -> str:
    if again.is_equivalent_but_for_kinks:
        return "agrees in everything" if has_reports else "has the same gradients and weights"
    left = again.exceeding[0]
    return f"agrees up to there ({left.measure.key.tensor} differs from step {left.step} on)"
