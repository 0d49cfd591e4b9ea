"""Detect an example's loss that depends on the other examples of its batch: a replica has only its own."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart
from emulate.verify.causes.static_tensors import possible_split
from emulate.verify.lines import operations


def _search(case: Case) -> Sign | None:
    first = case.base.first_step("gradient")
    if first is None or not any(step == first for _, step in case.explanation.unexplained):
        return None
    before = case.base.exceeding[0]
    agrees = rebase_on_replicas_apart(case, first)
    if agrees is None:
        return None
    m = before.measure
    case.unreachable.append(
        "code that each replica runs once (a count of its examples, a loss term that uses no examples): "
        "one device that processes the replicas one after the other runs it as often"
    )
    return Sign(
        (
            "The loss of one example depends on the other examples of its batch. Each replica sees only its own "
            "examples, so the program trains a different model."
        ),
        f"{m.key.tensor} ({m.key.kind}) differs from step {first} on, by {before.ratio:.0f}x the noise floor; {agrees}"
        + possible_split(case),
    )


IN_BATCH_NEGATIVES = Cause(
    "in-batch-negatives", _search, blame=(operations("loss", "contracts", "mixes", "ratio", "mixes-data"),)
)
