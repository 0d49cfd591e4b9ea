"""The loss is divided by the wrong number; the optimizer adds up what is added up already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emulate.verify.arithmetic import ROUND, Fit
from emulate.verify.arrays import aligned, norm
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, steps_in_words
from emulate.verify.causes.regularization import stands_apart
from emulate.verify.causes.replicas_apart import explains_a_sum
from emulate.verify.compare import Point
from emulate.verify.gradients import names_of, objective, weight_of, weights_before
from emulate.verify.measure import complete

_MANY = 16
"""So many elements beyond the noise floor do not have one factor by accident."""
_GROWS = (
    "The batch grows with the replicas, and what the loss is divided by does not. Give each replica its part, in\n"
    "distribute_datasets_from_function:\n"
    "    dataset.batch(context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE))\n"
    "or, if the batch is meant to grow, divide by its rows:\n"
    "    loss = tf.reduce_sum(per_example_loss) / (PER_REPLICA_BATCH_SIZE * strategy.num_replicas_in_sync)"
)
_ONCE_TOO_OFTEN = (
    "Add up, and divide once. A variable that collects gradients adds up with\n"
    "    tf.Variable(zeros, trainable=False, aggregation=tf.VariableAggregation.SUM)\n"
    "(MEAN divides by the number of replicas already), and ReduceOp.SUM does where ReduceOp.MEAN divides; or leave out the "
    "program's own division."
)
_OF_A_MEAN = (
    "gd.distributed takes one number, that of a compiled loss or what a train_step differentiates, for the mean over the rows "
    "that the step was given, and makes it this replica's part of the mean over all. Divide neither by the global batch size "
    "nor by the replicas:\n"
    "    loss = tf.reduce_mean(per_example_loss)\n"
    "or give the losses by row as they are."
)
_OF_ROWS = (
    "gpudist_core.TrainStep divides by the rows of all replicas itself: let per_example_loss give the rows' losses undivided, "
    "and give weights as the third part of the batch, (x, y, weight)."
)
_OF_ALL_ROWS = (
    "The step gathers or adds up over the replicas before it takes the loss: one that each of them takes over the rows of all "
    "counts once for each. Divide it\n"
    "    loss = loss_of_all_rows / strategy.num_replicas_in_sync\n"
    "or take that of the replica's own rows, divided by the rows of all:\n"
    "    loss = tf.reduce_sum(per_example_loss) / GLOBAL_BATCH_SIZE"
)
_OF_A_SUM = (
    "The loss is added up over the replicas before its gradient is taken, and the gradients are added up again. Take the "
    "gradient of the replica's own part; add up what is reported alone, outside of the tape:\n"
    "    with tf.GradientTape() as tape:\n"
    "        loss = tf.reduce_sum(per_example_loss) / GLOBAL_BATCH_SIZE  # nothing is added up here\n"
    "    gradients = tape.gradient(loss, variables)\n"
    "    reported = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, loss)"
)
_OF_ONE_NUMBER = (
    "The loss of a replica is one number for all its rows, that no row has a part of (Dice or IoU over a batch, a contrast "
    "between rows). Divide it by the number of replicas; a Keras loss whose call returns one number is not divided by Keras:\n"
    "    loss = loss_of_own_rows / strategy.num_replicas_in_sync\n"
    "What is left then is in-batch-negatives, by design. To train the same model as on one device give a number for each row "
    "(keras.losses.Dice(axis=(1, 2, 3)), say), or compare with the rows of all replicas:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    features = context.all_gather(features, axis=0)"
)
_TOO_SMALL = (
    "Something divides by the number of replicas once too often. Leave one of these out: tf.reduce_mean beside a division by "
    "num_replicas_in_sync or by the global batch; a division beside a Keras loss object, which divides by itself in a "
    "strategy; ReduceOp.MEAN, or a variable of aggregation MEAN that gradients are assigned to, where parts are added up:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    gradient = context.all_reduce(tf.distribute.ReduceOp.SUM, gradient)  # before it is assigned by hand"
)
_FEWEST = 3
"""Steps it takes to believe that replicas have one loss."""
_ROUND_OF_16_BITS = 1e-2
_ALIKE, _ABOUT = 0.8, 0.2
"""Cosine of two gradients that are the same but for a factor and some coupling, and how far that factor may be off."""
_HIDDEN = 0.05
"""The weights hide a factor when they are less than this part of the step away."""


def _fits(case: Case, *, replicated: bool) -> list[Fit]:
    fits = [fit for fit in case.explanation.scaled if fit.replicated == replicated]
    if not fits or any(abs(fit.scale / fits[0].scale - 1) > _near(case) for fit in fits):
        return []
    # A factor without a meaning that a few numbers of one step have may be anything.
    is_sure = len(fits) > 1 or fits[0].elements >= _MANY or _describe(case, fits[0].scale)[1]
    return fits if is_sure else []


def _near(case: Case) -> float:
    """How near two factors are that are taken for one; what is rounded to 16 bits shows them less exactly."""
    return _ROUND_OF_16_BITS if case.facts.casts else ROUND


def _describe(case: Case, scale: float) -> tuple[str, bool]:
    """A factor in words, and whether it is the number of replicas or one over it."""
    replicas, near = case.num_replicas, _near(case)
    if abs(scale / replicas - 1) < near:
        return f"{scale:.4f} times too large, the number of replicas ({replicas})", True
    if abs(scale * replicas - 1) < near:
        return f"{1 / scale:.4f} times too small, the number of replicas ({replicas})", True
    return f"{scale:.4g} times the reference's", False


def _search_scaling(case: Case) -> Sign | None:
    fits = _fits(case, replicated=False)
    if case.has("accumulation"):
        return None
    if not fits:
        return _about(case) or _drowned(case)
    scale = fits[0].scale
    mixed = any(fit.decay or fit.shares for fit in fits)
    off = {p.step: p.measure.error for p in case.base.objectives if p.measure.key.optimizer in {fit.optimizer for fit in fits}}

    def follows(point: Point) -> bool:
        """Whether a report is off by the factor, or as a sum of losses by as much as the one that has it."""
        by = off.get(point.step, 0.0)
        is_off_by_it = by > 0 and abs(point.measure.error / by - 1) < 10 * ROUND
        return mixed or abs(point.factor / scale - 1) < 10 * ROUND or is_off_by_it

    case.explain_fits(fits, follows)
    words, _ = _describe(case, scale)
    evidence = (
        f"sum of the local gradients / reference = {scale:.4f} for all tensors in {steps_in_words(fits)}; "
        f"divided by it, what is left is {max(fit.after for fit in fits):.1f} times the noise floor"
    )
    apart = [name for fit in fits for name in fit.decay if stands_apart(fit)]
    if apart:
        names = names_in_words(list(dict.fromkeys(apart)))
        evidence += f" (a regularization term of {names} is not scaled with the loss, which is right)"
    hidden = ". The weights hardly show it: this optimizer divides the factor out again"
    evidence += hidden if _is_hidden(case, fits[0]) else ""
    whose = f" of {fits[0].optimizer}" if len(case.base.runs.optimizers) > 1 else ""
    alike = _is_added_up(case, fits)
    evidence += ". Every replica takes its gradient of the same number, which is one device's loss" if alike else ""
    return Sign(f"The gradient of every variable{whose} is {words}.", evidence, _OF_A_SUM if alike else _cure(case, scale))


def _is_added_up(case: Case, fits: Sequence[Fit]) -> bool:
    """Whether replicas take the gradients of other rows of one number, that of one device: of a sum over the replicas."""
    if case.facts.gathers or case.facts.joins or case.ledger is None or not case.ledger.is_same:
        return False
    if any(abs(fit.scale / case.num_replicas - 1) > _near(case) for fit in fits):
        return False
    for fit in fits:
        ours, theirs = (complete(trace, fit.optimizer) for trace in (case.base.runs.topology, case.base.runs.reference))
        found = [{one.objective for one in step.values()} for step in ours]
        if len(ours) < _FEWEST or any(len(numbers) != 1 or None in numbers for numbers in found):
            return False  # in one step alone they may be equal by chance: of an untrained model, say
        (value,), right = found[fit.step], objective(theirs[fit.step])
        if value is None or right is None or abs(value - right) > ROUND * abs(right):
            return False
    return not case.ledger.identical_replicas


def _cure(case: Case, scale: float) -> str | None:
    """What to change where something tells how the loss is made; None for what suits most."""
    if (case.facts.gathers or case.facts.joins) and abs(scale / case.num_replicas - 1) < _near(case):
        return _OF_ALL_ROWS
    if case.ledger is not None and case.ledger.grows:
        return _GROWS
    if case.facts.distributed:
        return _OF_A_MEAN
    if case.facts.train_steps:
        return _OF_ROWS
    return _TOO_SMALL if scale < 1 else None


def _about(case: Case) -> Sign | None:
    """The number of replicas as a factor where rows depend on each other besides, so that none is exact."""
    first = case.base.first_step("gradient")
    optimizer = next((name for name, step in case.explanation.unexplained if step == first), None)
    losses = [point for point in case.base.objectives if point.step == first]
    if first is None or optimizer is None or (losses and not any(point.exceeds for point in losses)):
        return None
    views = case.base.views(optimizer, first)
    both = sum(float(np.dot(view.total, view.reference)) for view in views)
    sizes = [sum(norm(value) ** 2 for value in found) for found in ([v.total for v in views], [v.reference for v in views])]
    if not all(sizes) or both / np.sqrt(sizes[0] * sizes[1]) < _ALIKE:
        return None
    factor = both / sizes[1]
    if abs(factor / case.num_replicas - 1) > _ABOUT or not explains_a_sum(case, first):
        return None
    return Sign(
        f"The gradients are about {case.num_replicas} times too large, the number of replicas: each replica's loss is divided "
        "by its own rows, and the replicas are added up.",
        f"In step {first} the sum of the local gradients lies along the reference's and is {factor:.2f} times as long; what "
        "one device gives on the rows of one replica after the other, added up, is the same (a row's loss depends on others)",
        _OF_ONE_NUMBER,
    )


def _drowned(case: Case) -> Sign | None:
    """The losses that are differentiated are off by a factor, where the gradients are too much rounding to show it."""
    drowned, losses = case.base.drowned_from, [point for point in case.base.objectives if point.exceeds]
    first = min((point.step for point in losses), default=0)
    trained = case.base.first_step("gradient", "weight")
    if drowned is None or not losses or first < drowned or (trained is not None and trained < first):
        return None
    at_first = next(point for point in losses if point.step == first)
    words, _ = _describe(case, at_first.factor)
    m = at_first.measure
    case.explain(lambda point: point.measure.key.kind in ("loss", "metric", "gradient", "weight") and point.step >= first)
    return Sign(
        f"The loss that is trained is from step {first} on {words}.",
        f"What the gradients of step {first} are taken of is {m.value:.6g}, added up over the replicas, and "
        f"{m.reference_value:.6g} on one device ({at_first.ratio:.0f} times the noise floor); the gradients themselves are "
        f"too much rounding from step {drowned} on to show it",
    )


def _behind(case: Case) -> Sign | None:
    """A part of the loss that has the factor: seen in the gradients of tensors that no other part reaches."""
    parts = {name: fit for name, fit in case.parts.items() if not fit.shares}
    if not parts:
        return None
    fit = max(parts.values(), key=lambda one: one.elements)
    words, _ = _describe(case, fit.scale)
    return Sign(
        f"The gradient of a part of the loss is {words}.",
        f"Of {names_in_words(list(parts))} the sum of the local gradients / reference = {fit.scale:.4f} in step {fit.step}; "
        f"divided by it, what is left is {max(one.after for one in parts.values()):.1f} times the noise floor; other tensors, "
        "which other parts reach too, have no such factor",
    )


def _is_hidden(case: Case, fit: Fit) -> bool:
    """Whether the step changed the weights as the reference's did, in spite of the factor."""
    runs, apart, whole = case.base.runs, 0.0, 0.0
    ours, theirs = (complete(trace, fit.optimizer)[fit.step] for trace in (runs.topology, runs.reference))
    for tensor in names_of(theirs):
        before = weights_before(runs.reference, fit.optimizer, fit.step, tensor)
        stored = [before, weight_of(ours, tensor), weight_of(theirs, tensor)]
        if None not in stored:
            start, one, other = aligned([array for array in stored if array is not None])
            apart += norm(one - other) ** 2
            whole += norm(other - start) ** 2
    return apart < _HIDDEN**2 * whole


def _search_twice(case: Case) -> Sign | None:
    fits = _fits(case, replicated=True)
    if not fits or (case.ledger is not None and case.ledger.identical_replicas):
        return None
    case.explain_fits(fits)
    evidence = (
        f"The gradients that enter the optimizer are bit for bit the same on every replica although the rows differ "
        f"({steps_in_words(fits)}); their sum is {fits[0].scale:.4f} times the reference"
    )
    if fits[0].scale < 1:
        return Sign(
            "Gradients are divided by the number of replicas once too often, by the program and where they are averaged: "
            f"{1 / fits[0].scale:.4f} times too small.",
            evidence,
            _ONCE_TOO_OFTEN,
        )
    return Sign(
        f"Gradients are added up twice, by the program and again by the optimizer: {fits[0].scale:.4f} times too large.",
        evidence,
    )


LOSS_SCALING = Cause(
    code="loss-scaling",
    title="loss divided by the wrong number",
    meaning="Each replica averages over its own rows and the optimizer then adds up the replicas' gradients, so the "
    "step is as "
    "many times too large as there are replicas (or, divided twice, too small). With Adam the weights hardly show it; "
    "clipping, "
    "weight decay and learning rates do.",
    evidence="The sum of the local gradients is one and the same multiple of the reference's gradient for every variable, "
    "most often the number of replicas or one over it.",
    fix="Divide by the rows of the global batch, not by those of the replica:\n"
    "    loss = tf.reduce_sum(per_example_loss) / GLOBAL_BATCH_SIZE\n"
    "or tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE). Divide once only: Keras loss "
    "objects already divide by the number of replicas inside a strategy (but for one whose call returns a single number).",
    search=_search_scaling,
    behind=_behind,
)

DOUBLE_ALL_REDUCE = Cause(
    code="double-all-reduce",
    title="gradients added up twice",
    meaning="The program adds up the gradients itself (all_reduce) and hands the sum to an optimizer that adds it up "
    "over the "
    "replicas again.",
    evidence="The gradients that enter the optimizer are bit for bit the same on every replica although the rows "
    "differ, and "
    "their sum is a multiple of the reference's.",
    fix="Hand the local gradients to the optimizer, or divide the reduced ones by the number of replicas:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    g = context.all_reduce(tf.distribute.ReduceOp.SUM, g) / context.num_replicas_in_sync",
    search=_search_twice,
)
