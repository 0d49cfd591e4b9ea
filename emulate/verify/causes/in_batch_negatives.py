"""Detect an example's loss that depends on the other examples of its batch: a replica has only its own."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.padding import is_padded_otherwise
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart
from emulate.verify.lines import operations


def _search(case: Case) -> Sign | None:
    first = case.base.first_step("gradient")
    if first is None or not _is_open(case, first):
        return None
    before = case.base.exceeding[0]
    agrees = rebase_on_replicas_apart(case, first)
    if agrees is None:
        return None
    m = before.measure
    case.unreachable.append(
        "code that does not depend on the examples (a loss term without examples, a count): the sequential replay runs it "
        "once for each replica, as the replicas do"
    )
    return Sign(
        (
            "The loss of one example depends on the other examples of its batch. Each replica sees only its own "
            "examples, so the program trains a different model."
        ),
        f"{m.key.tensor} ({m.key.kind}) differs from step {first} on, by {before.ratio:.0f}x the noise floor; {agrees}",
        _OF_PADDING if is_padded_otherwise(case, m.key.optimizer, first) else None,
    )


def _is_open(case: Case, step: int) -> bool:
    """Return whether no model explains the gradients of a step, or weights for which there is no count."""
    weighted = () if case.has("local-normalization") else case.explanation.weighted
    without_count = [fit.step for fit in weighted if not case.are_counts(fit)]
    return step in [*(k for _, k in case.explanation.unexplained), *without_count]


_OF_PADDING = "If each host pads its own batches"

IN_BATCH_NEGATIVES = Cause(
    "in-batch-negatives",
    _search,
    blame=(operations("loss", "contracts", "mixes", "ratio", "mixes-data"), operations("loss", "moves")),
)
