"""Report a difference that no cause explains."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import OF_GROUPS, Cause, Sign, names_in_words
from emulate.verify.causes.variable_aggregation import is_assigned
from emulate.verify.compare import Point
from emulate.verify.lines import Blame, between, made, operations

_DECIDED = ("replicas-missing", "missing-all-reduce", "replicas-disagree", "empty-shard", "nan")
"""After these the arithmetic of later steps says nothing of its own."""


def _search(case: Case) -> Sign | None:
    left = case.left()
    if case.is_of_groups and not case.found:
        return Sign("The gradients depend on which replica has which examples, and no known cause explains it.", OF_GROUPS)
    if not left and not case.found:
        return _rows(case)
    if not left or any(case.has(code) for code in _DECIDED):
        return None
    first = left[0]
    d = first.difference()
    where = f"{d.kind} of {d.tensor}" if d.kind in ("gradient", "weight") else f"{d.kind} {d.tensor}"
    return Sign(
        f"From step {d.step} on the {where} differs, and no known cause explains it.",
        (
            f"error {d.error:.2g}, noise floor {d.noise:.2g} ({first.ratio:.0f}x); {len({p.measure.key for p in left})} "
            f"of {len({p.measure.key for p in case.base.points})} compared values differ in some "
            f"step{_assigned_too(case, d.step)}"
        ),
        _fix(case, first),
        blame=_blame(case, first),
    )


def _blame(case: Case, first: Point) -> list[Blame]:
    """Return where the lines of the first difference are looked for: all of its stage."""
    key, step = first.measure.key, first.step
    of_kind = {
        "initial-weight": [made("start", "num_replicas", in_step=False)],
        "weight": [operations("update", "apply"), made("update", "apply"), operations("assigned", "assign")],
        "variable": [operations("assigned", "assign")],
        "loss": [operations("reported", "made", "reduced")],
        "metric": [operations("reported", "made", "reduced")],
        "data": [made("examples", "dataset function", "map", "shuffle", "batch", "distribute")],
        "final-weight": [made("ending", "restore")],
    }
    if key.kind != "gradient":
        return of_kind.get(key.kind, [])
    loss_differs = any(point.exceeds for point in case.base.objectives if point.step == step)
    numbered = [operations("loss", "numbers")] if case.facts.gathers else []  # labels and masks of gathered examples
    return [*numbered, between("loss")] if loss_differs else [*numbered, between("given"), between("loss")]


def _assigned(case: Case, step: int) -> list[str]:
    """Return variables that the step assigns itself and that differ in the same step."""
    points = (point for point in case.base.exceeding if point.step == step and is_assigned(case, point))
    return list(dict.fromkeys(point.measure.key.tensor for point in points))


def _assigned_too(case: Case, step: int) -> str:
    names = _assigned(case, step)
    return (
        f"; in the same step {names_in_words(names)}, which the step assigns, differ{'s' * (len(names) == 1)} too"
        if names
        else ""
    )


def _fix(case: Case, first: Point) -> str | None:
    """Return where to look; None for the general advice."""
    if first.measure.key.kind == "gradient" and _assigned(case, first.step):
        return _OF_ASSIGNED
    key, before = first.measure.key, case.base.first_step("gradient")
    if key.kind == "weight" and key.optimizer == "tape" and (before is None or before > first.step):
        return _OF_UPDATE
    return _OF_GATHERED if case.facts.gathers else None


_OF_ASSIGNED = "If the step assigns a variable"
_OF_UPDATE = "If you write the update yourself"
_OF_GATHERED = "If the step gathers over the replicas"


def _rows(case: Case) -> Sign | None:
    """Check for examples that differ in a way that no cause explains."""
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None:
        return None
    n = ledger.samples
    return Sign(
        f"From step {ledger.first_apart} on the examples differ from those of one device, and no known cause explains it.",
        (
            f"one device had none of {ledger.foreign} of {n.seen} examples. gpudist identifies an example by its "
            "contents, so an augmentation that depends on the host or the position makes other examples"
        ),
        "If the examples differ",
        blame=[made("examples", "dataset function", "map", "shuffle", "batch", "distribute")],
    )


UNEXPLAINED = Cause("unexplained", _search)
