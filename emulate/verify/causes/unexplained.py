"""A difference that no cause explains."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words
from emulate.verify.causes.variable_aggregation import is_assigned
from emulate.verify.compare import Point

_DECIDED = ("replicas-missing", "missing-all-reduce", "replicas-disagree", "empty-shard", "nan")
"""After these the arithmetic of later steps says nothing of its own."""


def _search(case: Case) -> Sign | None:
    left = case.left()
    if not left and not case.found:
        return _rows(case)
    if not left or any(case.has(code) for code in _DECIDED):
        return None
    first = left[0]
    d = first.difference()
    where = f"{d.kind} of {d.tensor}" if d.kind in ("gradient", "weight") else f"{d.kind} {d.tensor}"
    return Sign(
        f"From step {d.step} on the {where} differs, and no known cause explains it.",
        f"error {d.error:.2g} against a noise floor of {d.noise:.2g} ({first.ratio:.0f} times); "
        f"{len({p.measure.key for p in left})} of {len({p.measure.key for p in case.base.points})} compared quantities "
        f"differ at some step{_assigned_too(case, d.step)}",
        _fix(case, first),
    )


def _assigned(case: Case, step: int) -> list[str]:
    """Variables that the step assigns itself, and that differ in the same step."""
    points = (point for point in case.base.exceeding if point.step == step and is_assigned(case, point))
    return list(dict.fromkeys(point.measure.key.tensor for point in points))


def _assigned_too(case: Case, step: int) -> str:
    names = _assigned(case, step)
    return f"; in the same step {names_in_words(names)}, which it assigns, differ{'s' * (len(names) == 1)} too" if names else ""


def _fix(case: Case, first: Point) -> str | None:
    """Where to look; None for what suits most."""
    if first.measure.key.kind == "gradient" and _assigned(case, first.step):
        return _OF_ASSIGNED
    key, before = first.measure.key, case.base.first_step("gradient")
    if key.kind == "weight" and key.optimizer == "tape" and (before is None or before > first.step):
        return _OF_UPDATE
    return _OF_GATHERED if case.facts.gathers else None


_OF_ASSIGNED = (
    "Look first at what the step assigns: where a replica reads it back in the same step (the range of a quantizer, a centre, "
    "a running mean), it reads what its own rows alone have made of it. Make it of all rows before it is assigned:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.reduce_sum(x), tf.cast(tf.size(x), x.dtype)])\n"
    "    least = tf.reduce_min(context.all_gather(tf.reshape(tf.reduce_min(x), [1]), axis=0))  # or a maximum"
)
_OF_UPDATE = (
    "The replicas' gradients are those of one device together, and the update that is made of them by hand is another one. "
    "They have to be put together before anything is done with them that is no sum (a square root, as Adam's, a clipping, a "
    "normalization); variables that average what replicas assign are too late for that:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    grads = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)  # SUM where losses are divided by the rows of all"
)
_OF_GATHERED = (
    "The step gathers over the replicas: what replica r has stands among the rows of all from the rows of the replicas before "
    "it on. Labels, masks and whatever else tells a row by its number there need that offset:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    counts = context.all_gather(tf.shape(z)[:1], axis=0)  # rows of each replica\n"
    "    offset = tf.reduce_sum(counts[: context.replica_id_in_sync_group])\n"
    "    labels = offset + tf.range(tf.shape(z)[0])\n"
    "Where they have it, gradients must flow back through the gathering (no tf.stop_gradient on what was gathered: what a "
    "replica's rows do to the losses of the others' is part of their gradient).\n"
    "Or it is something else that knows the replica's number, or sees its rows alone."
)


def _rows(case: Case) -> Sign | None:
    """Rows differ in a way that no cause knows."""
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None:
        return None
    n = ledger.samples
    return Sign(
        f"From step {ledger.first_apart} on the rows are not those of one device, and no known cause explains it.",
        f"{ledger.foreign} of {n.seen} rows are none that one device had; the contents of a row identify it, so an "
        "augmentation that "
        f"depends on the host or its position makes other rows",
        "Look at what makes the rows. An augmentation that draws by the host's seed or by the position in its share draws "
        "otherwise on another topology, and the same on hosts that were seeded alike; let it depend on the row, with "
        "tf.image.stateless_* or tf.random.stateless_*:\n"
        "    dataset.enumerate().map(lambda i, row: augment(row, seed=(SEED, i)))\n"
        "before the dataset is sharded; gpudist_core's Pipeline.map(function, random=True) does that. What each host learns "
        "from its own share (a vocabulary, a mean, adapt()) makes other rows too: let all learn it from all rows.",
    )


UNEXPLAINED = Cause(
    code="unexplained",
    title="a difference without a known cause",
    meaning="The run differs from the one on one device by more than rounding, and none of the known causes leaves "
    "such a trace.",
    evidence="An error far above the noise floor that remains after every known cause was looked for.",
    fix="Look at what the first differing tensor's gradient depends on: anything that sees only the replica's rows (a "
    "mean, a maximum, a "
    "normalization, a count) or that knows the replica's number. --precision float64 tells whether rounding is amplified.",
    search=_search,
)
