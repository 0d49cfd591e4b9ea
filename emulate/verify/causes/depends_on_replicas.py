"""A step that computes something else where there are more replicas."""

from __future__ import annotations

from emulate.verify.arithmetic import explain
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import explains_up_to, is_possible, rebase_where_numbers_matter
from emulate.verify.compare import Comparison


def _search(case: Case) -> Sign | None:
    first, apart = case.base.first_step("gradient"), case.base.first_step("weight")
    if apart is not None and (first is None or first > apart):
        return _of_update(case, apart)
    if first is None or not is_possible(case) or not any(step == first for _, step in case.explanation.unexplained):
        return None
    given = case.switched("replay") if case.ledger is not None and case.ledger.by else None
    if given is not None and explains_up_to(given, first, case.base):
        return _of_what_it_is_given(case, given, first)
    told = case.switched("told")
    how = _how(told, first, case.base) if told is not None else None
    if told is None or how is None:
        return _of_number(case, first)
    before = case.base.exceeding[0]
    case.rebase(told, "told")
    if case.explanation.scaled:
        case.explain_fits(case.explanation.scaled)
    return Sign(
        f"The step computes with the number of replicas ({case.num_replicas}) more than the loss is divided by: for the same "
        "rows and weights it has other gradients where there are more of them.",
        f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {first} on, {before.ratio:.0f} times the "
        f"noise floor; one device on the same rows, told that there are {case.num_replicas} replicas, {how}",
    )


def _of_number(case: Case, step: int) -> Sign | None:
    """One device that is told each replica's number with its rows has the same gradients."""
    before = case.base.exceeding[0]
    agrees = rebase_where_numbers_matter(case, step)
    if agrees is None:
        return None
    return Sign(
        "What a replica computes depends on its own number (replica_id_in_sync_group): the same rows have other gradients on "
        "another replica.",
        f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {step} on, {before.ratio:.0f} times the "
        f"noise floor; {agrees}",
        _ALIKE,
    )


def _of_what_it_is_given(case: Case, given: Comparison, step: int) -> Sign:
    """One device that is handed the same, and knows of no other replica, has the same gradients."""
    before = case.base.exceeding[0]
    case.rebase(given, "replay")
    return Sign(
        "What the program computes and hands to the step is other for the same rows: made by one replica for all, say, or put "
        "together in an order that is not that of the rows.",
        f"{before.measure.key.tensor} ({before.measure.key.kind}) differs from step {step} on, {before.ratio:.0f} times the "
        "noise floor; one device that is handed the same beside the same rows, and knows of no other replica, has the same "
        "gradients",
        _SAME_INPUTS,
    )


def _of_update(case: Case, step: int) -> Sign | None:
    """Gradients agree and weights do not: the number of replicas makes the update another one."""
    left = [p for p in case.left() if p.step == step and p.measure.key.kind == "weight"]
    told = case.switched("batch-of") if left and is_possible(case) else None
    if told is None or not explains_up_to(told, step, case.base):
        return None
    case.rebase(told, "batch-of")
    return Sign(
        f"The update of the weights depends on the number of replicas ({case.num_replicas}): from the same gradients it makes "
        "other weights where there are more of them.",
        f"{left[0].measure.key.tensor} differs after step {step}, {left[0].ratio:.0f} times the noise floor, and its gradient "
        f"agrees; one device on the same rows, told that there are {case.num_replicas} replicas, has the same weights",
        _SAME_UPDATE,
    )


def _how(told: Comparison, step: int, before: Comparison) -> str | None:
    """In which way one device that is told the number has the same gradients: as they are, or but for what divides the loss."""
    if explains_up_to(told, step, before):
        return "has the same gradients"
    found = explain(told)
    fits = [fit for fit in found.scaled if fit.step == step and not (fit.decay or fit.shares)]
    if not fits or any(unexplained == step for _, unexplained in found.unexplained):
        return None
    return f"has the same gradients but for one factor, {fits[0].scale:.4g}, by which it divides the loss"


_ALIKE = (
    "Use a replica's number for one thing: to take its own part of what all have (rows, a slice of a tensor). What every row "
    "has (a label smoothing, a weight, noise) every replica has to give it; what is added once for all (a term that depends "
    "on no row) every replica adds divided by their number, whatever its own:\n"
    "    loss += term / strategy.num_replicas_in_sync"
)
_SAME_INPUTS = (
    "Whatever one row has (a state, a prediction, a label made of one) has to come back to that row. Hand each replica its own "
    "part, as Strategy.run returned it:\n"
    "    loss, state = strategy.run(step, args=(x, y, state))  # not experimental_local_results(state)[0]\n"
    "and put parts together batch by batch, in the order of the replicas, before the next batch comes:\n"
    "    predictions.append(strategy.gather(strategy.run(predict, args=(x,)), axis=0))"
)
_SAME_UPDATE = (
    "The global batch is the same on every topology, and so is the step that suits it. Say the learning rate (the decay, the "
    "steps of a schedule) as a number of the program's configuration, not as\n"
    "    BASE_RATE * strategy.num_replicas_in_sync\n"
    "which suits a batch that grows with the replicas."
)


DEPENDS_ON_REPLICAS = Cause(
    code="depends-on-replicas",
    title="the step depends on the number of replicas",
    meaning="What a row contributes is computed with num_replicas_in_sync: a label smoothing, a temperature, a margin, "
    "statistics of a part of the data. On more replicas it is another loss. Or the update is: a learning rate, a decay. Or "
    "what the program computes for the rows of the next step (states, labels): one replica's is handed to all. Or a replica's "
    "own number makes it another one: a term or a label smoothing of the first replica alone.",
    evidence="One device that is told the number of replicas has the replicas' gradients (or, where these agree, weights) on "
    "the same rows; told that it is alone it has not. Or it has them once it is handed, beside the same rows, what the program "
    "has computed on the replicas for them; or, with the rows of one replica after the other, each replica's number.",
    fix="Use the number of replicas for one thing: to divide what the replicas add up.\n"
    "    loss = tf.reduce_sum(per_example_loss) / GLOBAL_BATCH_SIZE  # nothing in per_example_loss knows how many there are\n"
    "Where losses are divided by it, divide all their parts: one that is not divided weighs more with every replica. Keras's "
    "compute_loss and loss objects, and tf.nn.compute_average_loss, divide by it; what is added beside them is not divided:\n"
    "    loss = self.compute_loss(x, y, y_pred) + tf.reduce_mean(own_term) / strategy.num_replicas_in_sync\n"
    "What has to follow the size of the cluster (a schedule, a learning rate) belongs into the program's configuration.",
    search=_search,
)
