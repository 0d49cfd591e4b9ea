"""What a step keeps in Python, which changes with each replica's call."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import rebase_where_turns_matter


def _search(case: Case) -> Sign | None:
    first = case.base.first_step("gradient")
    if first is None or case.facts.clips:
        return None
    found = case.explanation
    weighted = [fit for fit in found.weighted if not case.are_counts(fit)]
    if not any(fit.step == first for fit in weighted) and not any(step == first for _, step in found.unexplained):
        return None
    before = case.base.exceeding[0]
    agrees = rebase_where_turns_matter(case, first)
    if agrees is None:
        return None
    key = before.measure.key
    return Sign(
        "The step keeps something in Python (a counter, a list, a generator) that changes with each replica's call: "
        f"{case.num_replicas} times in a step, and to something else on each.",
        f"{key.tensor} ({key.kind}) differs from step {first} on, {before.ratio:.0f} times the noise floor; {agrees}",
    )


PYTHON_STATE = Cause(
    code="python-state",
    title="Python state that each replica's call changes",
    meaning="Strategy.run calls the step once for each replica of a host, one after the other (in a tf.function while it is "
    "traced). What the step counts or keeps in Python objects moves on with each call: a schedule that one device follows is "
    "N times as fast on N replicas, and each replica is at another place of it.",
    evidence="One device on the rows of one replica after the other, its gradients added up, does what the replicas do, and no "
    "longer when the last replica's rows come first.",
    fix="Count once a step, outside of Strategy.run, and hand the number in as a tensor:\n"
    "    strategy.run(train_step, args=(x, y, tf.constant(step, tf.float32)))",
    search=_search,
)
