"""Detect Python state of a step that changes with each replica's call."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import rebase_where_turns_matter
from emulate.verify.lines import between, changes_of_state


def _search(case: Case) -> Sign | None:
    first = case.base.first_step("gradient")
    if first is None or case.facts.clips:
        return None
    explanation = case.explanation
    weighted = [fit for fit in explanation.weighted if not case.are_counts(fit)]
    if not any(fit.step == first for fit in weighted) and not any(step == first for _, step in explanation.unexplained):
        return None
    before = case.base.exceeding[0]
    agrees = rebase_where_turns_matter(case, first)
    if agrees is None:
        return None
    key = before.measure.key
    return Sign(
        (
            "The step changes something in Python (a counter, a list, a generator) with each replica's call: "
            f"{case.num_replicas} times in a step, with another value on each replica."
        ),
        f"{key.tensor} ({key.kind}) differs from step {first} on, by {before.ratio:.0f}x the noise floor; {agrees}",
    )


PYTHON_STATE = Cause("python-state", _search, blame=(changes_of_state("loss"), between("loss")))
