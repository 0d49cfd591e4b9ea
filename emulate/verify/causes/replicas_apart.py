"""One device on the rows of one replica after the other: what of a difference comes of that alone."""

from __future__ import annotations

from dataclasses import replace

from emulate.verify.case import Case
from emulate.verify.compare import Comparison

NOTE = "gradients, weights and losses were compared with the reference on the rows of one replica after the other"


_SUMS = ("replicas-summed", "replicas")
_SUMS_AT_TAPES = ("replicas-taped", "replicas-taped-told", "replicas-taped-mean")
"""For a program that does more with gradients by itself than to hand them to an optimizer."""
_REPORTED = ("loss", "metric")
_TRAINED = ("initial-weight", "gradient", "weight", "variable")


def is_possible(case: Case) -> bool:
    """Whether one device can be given the rows of the replicas: those of one device, or more by the number of replicas."""
    ledger = case.ledger
    return case.num_replicas > 1 and ledger is not None and (ledger.grows or ledger.first_apart is None)


def rebase_on_replicas_apart(case: Case, step: int, *, grouping_matters: bool = True) -> str | None:
    """Judge on a reference that computes as the replicas do, each for itself, where it explains a step's gradients.

    Args:
        case: The case; its base is that reference's comparison then.
        step: The first step whose gradients differ.
        grouping_matters: Whether it is to matter which rows are together on a replica. Where it does not, what comes once
            for each replica depends on no row.

    Returns:
        What agrees with it, in words; None where it does not explain them, or where grouping matters otherwise than asked.
    """
    if not is_possible(case):
        return None
    for switch in _sums(case):
        again = case.switched(switch, alone=True)
        if again is None or not explains_up_to(again, step):
            continue
        if explains_up_to(case.switched(f"{switch}-regrouped", alone=True), step) == grouping_matters:
            return None
        if (
            not again.is_equivalent_but_for_kinks
            and again.first_step("initial-weight", "gradient", "weight", "variable") is None
        ):
            again = replace(again, points=tuple(p for p in again.points if p.measure.key.kind not in _REPORTED))
            case.unreachable.append("losses and metrics: one device reports those of one replica after the other otherwise")
        case.rebase(again)
        case.clips_the_sum = switch in _SUMS_AT_TAPES
        case.notes.append(NOTE)
        told = f"one device on the rows of one replica after the other, its gradients added up, {_agreement(again)}"
        return told if grouping_matters else f"{told}, and which rows are together does not matter"
    return None


def _sums(case: Case) -> tuple[str, ...]:
    if "tape" in case.topology.optimizers:
        return _SUMS_AT_TAPES
    return _SUMS + (_SUMS_AT_TAPES if case.facts.clipped_by else ())


def explains_a_sum(case: Case, step: int) -> bool:
    """Whether one device on the rows of one replica after the other, its gradients added up, explains a step's gradients."""
    return is_possible(case) and any(explains_up_to(case.switched(switch, alone=True), step) for switch in _SUMS)


def explains_up_to(again: Comparison | None, step: int) -> bool:
    """Whether the gradients agree up to, and in, the step in which they differed."""
    if again is None:
        return False
    found = again.first_step("initial-weight", "gradient", "weight")
    compared = any(p.step == step and p.measure.key.kind == "gradient" for p in again.points)
    return compared and (found is None or found > step)


def _agreement(again: Comparison) -> str:
    if again.is_equivalent_but_for_kinks:
        return "agrees in everything"
    left = again.exceeding[0]
    return f"agrees then ({left.measure.key.tensor} differs from step {left.step} on)"
