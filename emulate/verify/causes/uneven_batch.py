"""Replicas with fewer rows (or fewer that count) weigh as much as the others."""

from __future__ import annotations

from emulate.verify.arithmetic import Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers, steps_in_words
from emulate.verify.measure import complete


def _search_uneven(case: Case) -> Sign | None:
    fits = case.explanation.uneven
    if not fits:
        return None
    case.explain_fits(fits)
    first = fits[0]
    rows = _rows(case, first)
    return Sign(
        f"Replicas with fewer rows weigh as much as the others: step {first.step} has {numbers(rows)} rows on its replicas.",
        f"{steps_in_words(fits)}: the sum of the local gradients is {first.before:.1%} off (L2); with each replica "
        "weighted by its "
        f"share of the rows it is the reference's within {max(fit.after for fit in fits):.1f} times the noise floor"
        + _even_steps(case, fits),
        _OF_FIT if case.facts.compiled else None,
    )


def _rows(case: Case, fit: Fit) -> list[int]:
    step = complete(case.base.runs.topology, fit.optimizer)[fit.step]
    return [len(one.rows or ()) for _, one in sorted(step.items())]


def _even_steps(case: Case, fits: tuple[Fit, ...]) -> str:
    before = fits[0].step
    return (
        f"; the {before} steps before it, with even shards, agree"
        if before and case.base.first_step("gradient") == before
        else ""
    )


def _search_weighted(case: Case) -> Sign | None:
    fits = case.explanation.weighted
    if not fits or case.has("clip-before-reduce"):
        return None
    case.explain_fits(fits)
    first = fits[0]
    shares = numbers([f"{share:.3f}" for _, share in sorted(first.shares.items())])
    if not case.are_counts(first):
        return Sign(
            "Each replica's gradient has a factor of its own that no count gives: a function of the replica's own loss (a "
            "root, a logarithm, a ratio), where one device has that of the whole batch.",
            f"{steps_in_words(fits)}: the sum of the local gradients is {first.before:.1%} off (L2), and weighted by "
            f"{shares}, which do not add up to {len(first.shares)} as parts of one count do, it is the reference's for all "
            f"tensors within {max(fit.after for fit in fits):.1f} times the noise floor",
            _OF_ALL + (_COMPILED if case.facts.compiled else "") + (_OF_A_MEAN if case.facts.distributed else ""),
        )
    return Sign(
        "Each replica divides its loss by a count of its own (tokens, mask, weights) instead of the count over all replicas.",
        f"{steps_in_words(fits)}: the sum of the local gradients is {first.before:.1%} off (L2), and weighted by "
        f"{shares} it is the "
        f"reference's for all tensors within {max(fit.after for fit in fits):.1f} times the noise floor; the rows are even",
        _cure(case),
    )


def _cure(case: Case) -> str | None:
    """Where it is not enough to divide by a count of all replicas."""
    if case.facts.distributed or case.facts.train_steps:
        return _OF_CORE
    return _OF_COUNTS + _COMPILED if case.facts.compiled else None


def _behind(case: Case) -> Sign | None:
    """A part of the loss, where no other part reaches: in a tensor's gradient that a weight for each replica makes right."""
    parts = {name: fit for name, fit in case.parts.items() if _is_apart(fit) and case.are_counts(fit)}
    if not parts:
        return None
    fit = max(parts.values(), key=lambda one: one.before)
    shares = numbers([f"{share:.3f}" for _, share in sorted(fit.shares.items())])
    return Sign(
        "Each replica divides a part of its loss by a count of its own instead of the count over all replicas.",
        f"Of {names_in_words(list(parts))} the sum of the local gradients is in step {fit.step} up to {fit.before:.1%} off "
        f"(L2), and weighted by {shares} it is the reference's within {max(one.after for one in parts.values()):.1f} times the "
        "noise floor; other tensors, which other parts reach too, have no such weights",
        _cure(case),
    )


def _is_apart(fit: Fit) -> bool:
    """Whether replicas have weights of their own: one weight for all is that of something else (a norm of all gradients)."""
    return bool(fit.shares) and max(fit.shares.values()) - min(fit.shares.values()) > _APART


_APART = 3e-3
_OF_ALL = (
    "Take the function of what all replicas have together. Of a root, say, with the local sum of squares `part`:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    whole = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.stop_gradient(part))\n"
    "    loss = part / (2 * tf.sqrt(whole))  # its gradient, added up over the replicas, is that of sqrt(whole)"
)
_OF_COUNTS = (
    "Divide by the count over all replicas:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(mask))\n"
    "    loss = tf.reduce_sum(per_token_loss * mask) / count"
)
_COMPILED = (
    "\nA loss that is given to Keras's compile is called outside of the replicas too, where `context` is None: return the "
    "number as it is there."
)
_OF_FIT = (
    "Drop the partial batch: dataset.batch(GLOBAL_BATCH_SIZE, drop_remainder=True), which leaves its rows out; or let "
    "gpudist_core divide by the rows of all replicas:\n"
    "    model = gpudist_core.distributed(model)  # in strategy.scope(), before compile; fit goes on as it is\n"
    "A loss of one's own that divides by the rows of all has the right gradient, and Keras logs another number. In a loop of "
    "your own divide by the rows of all replicas:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.shape(y)[0], tf.float32))\n"
    "    loss = tf.reduce_sum(per_example_loss) / count"
)
_OF_A_MEAN = " gd.distributed takes it for a mean over the replica's rows: multiply it by context.num_replicas_in_sync."
_OF_CORE = (
    "gpudist_core counts over all replicas by itself: let the loss give one value for each row, or for each token, undivided, "
    "and say what counts by weights: (x, y, weight) in the batch of a TrainStep, sample_weight in fit."
)

UNEVEN_BATCH = Cause(
    code="uneven-batch",
    title="mean of means over uneven shards",
    meaning="A batch that does not divide by the replicas (the last of an epoch) leaves some replicas fewer rows. Each "
    "replica "
    "takes the mean over its own rows and the means are averaged, so a row on a small shard weighs more than one on a "
    "large "
    "shard. Keras's fit does this too.",
    evidence="Only steps with uneven shards differ, and there the local gradients weighted by each replica's share of "
    "the rows "
    "add up to the reference's.",
    fix="Divide by the rows of all replicas:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.shape(y)[0], tf.float32))\n"
    "    loss = tf.reduce_sum(per_example_loss) / count\n"
    "or drop the partial batch: dataset.batch(GLOBAL_BATCH_SIZE, drop_remainder=True) (in fit too).",
    search=_search_uneven,
)

LOCAL_NORMALIZATION = Cause(
    code="local-normalization",
    title="loss normalized by a count of the replica",
    meaning="A loss over tokens, masked or weighted elements is divided by the replica's own count. Replicas have "
    "different "
    "counts, so the mean of their means is not the mean over the batch.",
    evidence="Some weight for each replica, the same for all tensors, turns the local gradients into the reference's, "
    "although "
    "every replica has as many rows.",
    fix=_OF_COUNTS,
    search=_search_weighted,
    behind=_behind,
)
