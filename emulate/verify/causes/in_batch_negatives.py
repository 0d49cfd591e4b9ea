"""A row's loss that depends on the other rows of its batch: a replica has its own rows alone."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart
from emulate.verify.causes.static_tensors import possible_split


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
        "what each replica does once beside it (a count of its own rows, a term of the loss that no row is in): one device on "
        "the rows of one replica after the other does it too"
    )
    return Sign(
        "The loss of a row depends on the other rows of its batch, and each replica sees only its own rows.",
        f"{m.key.tensor} ({m.key.kind}) differs from step {first} on, {before.ratio:.0f} times the noise floor; {agrees}"
        + possible_split(case),
    )


IN_BATCH_NEGATIVES = Cause(
    code="in-batch-negatives",
    title="a row's loss depends on the other rows of its batch",
    meaning="A contrastive loss takes the other rows of the batch as negatives; a hand-written batch normalization, a maximum "
    "or a ranking over the batch, or rows that are mixed in pairs, do the like. On N replicas each row meets only the rows of "
    "its replica: it is another loss, of batches of 1/N of the size, and so another model.",
    evidence="The replicas' gradients are no weighted sum of what the whole batch gives, and they are what one device gives "
    "on the rows of one replica after the other.",
    fix="Give each replica what its rows need of the others, and take the loss of its own rows. Of a mean, a variance, a share "
    "of a class or another statistic of the batch, that is sums (gradients flow back through them):\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(x, axis=0))\n"
    "Of a contrastive loss it is what each row is compared with:\n"
    "    everyone = context.all_gather(embeddings, axis=0)  # gradients flow back through it\n"
    "    counts = context.all_gather(tf.shape(embeddings)[:1], axis=0)  # a replica's rows come after those before it\n"
    "    labels = tf.reduce_sum(counts[: context.replica_id_in_sync_group]) + tf.range(tf.shape(embeddings)[0])\n"
    "    logits = tf.matmul(embeddings, everyone, transpose_b=True)\n"
    "Or accept it with --allow in-batch-negatives.",
    search=_search,
)
