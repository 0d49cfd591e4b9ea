"""Replicas that start differently or drift apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from emulate.probe import TAPES_JOINED
from emulate.probe.trace import Trace
from emulate.verify.agreement import Disagreement
from emulate.verify.arithmetic import ROUND, factor_of_updates, one_factor
from emulate.verify.arrays import Floats, aligned, largest
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.gradients import StepOfAll, gradients_of, names_of, weight_of, weights_before
from emulate.verify.measure import complete

_FOLLOWS = 0.95
"""From this part of the telling elements on, an update follows a gradient."""
_TELLING = 16


def _variables(apart: Disagreement) -> str:
    more = apart.tensors - 1
    return apart.tensor + (f" and {more} more variable{'s' if more > 1 else ''}" if more else "")


def _search_initial(case: Case) -> Sign | None:
    if case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    apart = case.agreement.initial
    if apart is not None:
        case.cut(0, "the replicas start from different weights")
        return Sign(
            f"Replicas start from different weights: {_variables(apart)}.",
            f"Bits of the initial {apart.tensor}: {_groups(apart)} agree among themselves only",
        )
    first = next((p for p in case.comparison.exceeding if p.measure.key.kind == "initial-weight"), None)
    if first is None:
        return None
    name, m = first.measure.key.tensor, first.measure
    differs = f"initial {name} differs by up to {m.error:.3g} ({m.value:.6g} against {m.reference_value:.6g})"
    if _is_of_each_host(case.untouched, name):
        case.cut(0, f"the hosts start from different values of {name}")
        return Sign(
            f"The hosts start from different values of {name}, which no optimizer trains, and one device from another one.",
            f"{differs}, and is not the same on all hosts",
        )
    return Sign(
        f"The run starts from other weights than on one device ({name}), although seeds are the same.",
        f"{differs}; on one device the run repeats",
    )


def _is_of_each_host(trace: Trace, name: str) -> bool:
    """Whether hosts have other first values of a variable; of a trained one the agreement of the replicas tells."""
    return len({values[name].digest for values in trace.variables("initial").values() if name in values}) > 1


def _search_missing_sum(case: Case) -> Sign | None:
    apart = case.agreement.first
    if case.has("replicas-missing"):
        return None
    if apart is not None and apart.optimizer is not None and not case.has("initial-weights"):
        return _each_its_own(case, apart)
    return _all_follow_one(case) or _averages_updates(case)


def _each_its_own(case: Case, apart: Disagreement) -> Sign | None:
    assert apart.optimizer is not None
    optimizer, k = apart.optimizer, apart.step
    step = complete(case.untouched, optimizer)[k]
    follows = [
        share for replica in sorted(step) if (share := _share(case.untouched, optimizer, k, replica, replica)) is not None
    ]
    if len(follows) >= 2 and min(follows) >= _FOLLOWS:
        of = f"{min(follows):.1%} of the elements in which that and the sum have opposite signs"
        how = f"goes against its own local gradient in {of}"
    elif all(_whose_update(case, case.untouched, optimizer, k, replica) == replica for replica in step):
        how = "is as many times its own gradient as that of one device is its"
    else:
        return None
    case.cut(k, "the replicas' weights differ", at=("gradient", "loss"))
    variables = f"{apart.tensors} variables differ" if apart.tensors > 1 else f"{apart.tensor} differs"
    return Sign(
        "Gradients are not added up over the replicas: each replica trains a model of its own.",
        f"After step {k} {variables} between replicas, and each replica's update {how}",
        _OUTSIDE if any(one.outside for one in step.values()) else None,
    )


def _all_follow_one(case: Case) -> Sign | None:
    """The replicas agree, but the update is that of one replica's gradient."""
    k = case.base.first_step("weight")
    early = case.base.first_step("gradient", "initial-weight")
    if k is None or (early is not None and early <= k):
        return None
    for optimizer in case.base.runs.optimizers:
        step = next(iter(complete(case.base.runs.topology, optimizer)[k : k + 1]), {})
        out = {p.measure.key.tensor for p in case.base.exceeding if p.step == k and p.measure.key.optimizer == optimizer}
        some = [tensor for tensor in names_of(step) if tensor in out]
        for tensors in (names_of(step), some) if len(step) > 1 else ():
            sign = _of_one_replica(case, optimizer, k, tensors)
            if sign is not None:
                case.explain(lambda point: point.step > k or (point.step == k and point.measure.key.kind == "weight"))
                return sign
    return None


def _of_one_replica(case: Case, optimizer: str, k: int, tensors: Sequence[str]) -> Sign | None:
    """Whether the update of these tensors, all or those alone that differ, is that of one replica's gradient."""
    topology = case.base.runs.topology
    step = complete(topology, optimizer)[k]
    shares = {r: _share(topology, optimizer, k, min(step), r, tensors) for r in step}
    known = [r for r, share in shares.items() if share is not None and share >= _FOLLOWS]
    replica = known[0] if len(known) == 1 else _whose_update(case, topology, optimizer, k, min(step), tensors)
    if replica is None:
        return None
    whose = "" if len(tensors) == len(names_of(step)) else f" of {names_in_words(tensors)}"
    return Sign(
        f"Gradients{whose} are not added up over the replicas: all replicas apply that of replica {replica}.",
        f"Step {k}: the local gradients add up to the reference's, but the update{whose} "
        + (
            f"goes against replica {replica}'s gradient in {shares[replica]:.1%} of the elements in which that and the "
            "sum have opposite signs"
            if known
            else f"is as many times replica {replica}'s gradient as that of one device is its own"
        ),
        _OUTSIDE if any(one.outside for one in step.values()) else None,
    )


def _whose_update(
    case: Case, topology: Trace, optimizer: str, k: int, updated: int, tensors: Sequence[str] | None = None
) -> int | None:
    """Where one device's update is a number times its gradient: the replica whose gradient, times that, makes a replica's."""
    reference = case.base.runs.reference
    step, steps = complete(topology, optimizer)[k], complete(reference, optimizer)
    if len(steps) <= k:
        return None
    ours = [_update(topology, optimizer, k, updated, step, tensor) for tensor in tensors or names_of(step)]
    alone = steps[k]
    theirs = [_update(reference, optimizer, k, min(alone), alone, tensor) for tensor in tensors or names_of(alone)]
    wanted = one_factor([(one[0], np.sum(list(one[1].values()), axis=0)) for one in theirs if one is not None])
    factors = {r: one_factor([(one[0], one[1][r]) for one in ours if one is not None and r in one[1]]) for r in step}
    found = [r for r, factor in factors.items() if factor and wanted and abs(factor / wanted - 1) < ROUND]
    return found[0] if len(found) == 1 else None


_OUTSIDE = (
    "Add up what Strategy.run returns, before anything is made of it:\n"
    "    grads = [strategy.reduce(tf.distribute.ReduceOp.SUM, g, axis=None) for g in grads]  # MEAN of local means\n"
    "(experimental_local_results(g)[0] is that of one replica), or let the replicas do so, in what they return:\n"
    "    grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)"
)


def _averages_updates(case: Case) -> Sign | None:
    """The replicas agree, and each has made an update by hand of its own gradient: the variables average what is assigned.

    That is right for what is linear in the gradients alone, so one factor says nothing; with the gradients of all replicas put
    together where the tapes make them it is gone.
    """
    k, early = case.base.first_step("weight"), case.base.first_step("gradient", "initial-weight", "variable")
    if k is None or case.facts.clips or case.facts.clipped_by or (early is not None and early < k):
        return None
    out = [p for p in case.base.exceeding if p.step == k and p.measure.key.kind in ("gradient", "weight")]
    if any(p.measure.key.kind == "gradient" or p.measure.key.optimizer != "tape" for p in out):
        return None
    again = case.switched(TAPES_JOINED[case.base.runs.how("tape")])
    later = None if again is None else again.first_step("initial-weight", "gradient", "weight", "variable")
    if again is None or not again.points or (later is not None and later <= k):
        return None
    first = next(p for p in out if p.measure.key.kind == "weight")
    case.explain(lambda point: point.step > k or (point.step == k and point.measure.key.kind in ("weight", "variable")))
    how = case.base.runs.how("tape").upper()
    is_outside = any(one.outside for one in complete(case.base.runs.topology, "tape")[k].values())
    return Sign(
        "Gradients are not added up over the replicas: "
        + (
            "the update outside of Strategy.run is not made of their sum."
            if is_outside
            else "each replica makes an update of its own, and the variables average what the replicas assign."
        ),
        f"Step {k}: the local gradients add up to the reference's, and {first.measure.key.tensor} is {first.ratio:.0f} times "
        "the noise floor away; with the gradients of all replicas put together where the tape makes them "
        + ("everything agrees" if later is None else f"it agrees up to step {later - 1}"),
        _OUTSIDE if is_outside else _OF_UPDATES.format(how=how),
    )


_OF_UPDATES = (
    "Put the gradients together before anything is made of them that is no sum (a square root, as Adam's, a norm, a sign): "
    "variables that average what the replicas assign (VariableAggregation.MEAN) are too late for that.\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    grads = context.all_reduce(tf.distribute.ReduceOp.{how}, grads)"
)


def _share(
    trace: Trace, optimizer: str, k: int, updated: int, source: int, tensors: Sequence[str] | None = None
) -> float | None:
    """In what part of the telling elements one replica's update goes against another's (or its own) local gradient.

    Telling are elements whose local gradient and sum of gradients have opposite signs, both well above zero.
    """
    step = complete(trace, optimizer)[k]
    right, telling = 0, 0
    for tensor in tensors or names_of(step):
        found = _update(trace, optimizer, k, updated, step, tensor)
        if found is None or source not in found[1]:
            continue
        update, gradients = found
        own, whole = gradients[source], np.sum(list(gradients.values()), axis=0)
        at = (own * whole < 0) & (np.abs(own) > 1e-3 * largest(own)) & (np.abs(whole) > 1e-3 * largest(whole)) & (update != 0)
        right += int((update[at] * own[at] < 0).sum())
        telling += int(at.sum())
    return right / telling if telling >= _TELLING else None


def _update(
    trace: Trace, optimizer: str, k: int, replica: int, step: StepOfAll, tensor: str
) -> tuple[Floats, Mapping[int, Floats]] | None:
    """How a step changed one tensor on one replica, and the local gradients of all."""
    after = weight_of({replica: step[replica]}, tensor) or weight_of(step, tensor)
    before = weights_before(trace, optimizer, k, tensor, replica)
    stored = gradients_of(step, tensor)
    if after is None or before is None or not stored or after.shape != before.shape:
        return None
    one, other, *gradients = aligned([after, before, *stored.values()])
    return one - other, dict(zip(stored, gradients, strict=True))


def _search_disagree(case: Case) -> Sign | None:
    apart = case.agreement.first
    if apart is None or any(case.has(code) for code in ("missing-all-reduce", "replicas-missing", "initial-weights")):
        return None
    case.cut(apart.step, "the replicas' weights differ", at=("gradient", "loss"))
    factor = _by_what_factor(case.untouched, apart)
    return Sign(
        f"From step {apart.step} on the replicas do not agree on {_variables(apart)}.",
        f"Bits of {apart.tensor} after step {apart.step}: {_groups(apart)} agree among themselves only; before, all did"
        f"{factor}",
        f"{_ALL_THE_SAME}\n{_OF_AN_END}" if factor and case.untouched.num_hosts == 1 and apart.step else None,
    )


_ALL_THE_SAME = (
    "Make every update of a mirrored variable from values that are the same on all replicas: all_reduce them "
    "first. (aggregation=tf.VariableAggregation.MEAN does that for a mean of even shards, and for nothing that is no mean of "
    "rows: a deviation, a maximum, a root.) What a host sets by itself (a learning rate, weights that a callback puts back, an "
    "optimizer's state that the chief alone restores) must be set on all hosts, by a number that is reduced over all of them."
)
_OF_AN_END = (
    "In Keras's fit, from the second epoch on, it is Keras's own doing: where TensorFlow does not know how many batches a "
    "dataset has (after unbatch, filter, from_generator) the first epoch ends within a step, which one replica's optimizer "
    "may count (iterations) and another's not. Tell their number:\n"
    "    dataset = dataset.apply(tf.data.experimental.assert_cardinality(NUMBER_OF_BATCHES))\n"
    "A loop of your own takes its batches outside of the tf.function."
)


def _by_what_factor(trace: Trace, apart: Disagreement) -> str:
    """Where one replica's update is another's times one number, that: it has another learning rate."""
    if apart.optimizer is None:
        return ""
    step = complete(trace, apart.optimizer)[apart.step]
    one, other = (int(group[0].rsplit(" ", 1)[1]) for group in apart.groups[:2])
    factor = factor_of_updates(
        [
            weights_before(trace, apart.optimizer, apart.step, tensor, one),
            *(weight_of({replica: step[replica]}, tensor) for replica in (other, one)),
        ]
        for tensor in names_of(step)
    )
    if factor is None or abs(factor - 1) < ROUND:
        return ""
    return f"; in that step every weight changes by {factor:.4g} times as much on replica {other} as on replica {one}"


def _groups(apart: Disagreement) -> str:
    return numbers([f"({', '.join(group[:4])}{', ...' if len(group) > 4 else ''})" for group in apart.groups[:4]])


INITIAL_WEIGHTS = Cause(
    code="initial-weights",
    title="different initial weights",
    meaning="Replicas, hosts or the run as a whole start from other weights than one device does: a seed that depends "
    "on the host "
    "or on the number of replicas, variables made outside the strategy's scope.",
    evidence="Bits of every variable before the first step, over replicas and hosts and against the reference.",
    fix="Make model and optimizer inside strategy.scope(), and seed all hosts alike: "
    "keras.utils.set_random_seed(SEED), the same "
    "SEED everywhere. A checkpoint, or weights of another model, must be loaded on every host, before the first step; what "
    "adapt() or a mean learns must be learnt from all rows, not from a host's share.",
    search=_search_initial,
)

MISSING_ALL_REDUCE = Cause(
    code="missing-all-reduce",
    title="gradients are not added up",
    meaning="Each replica applies its own gradient, or all apply that of one: the strategy's sum over the replicas is bypassed "
    "(assigning variables by hand, an optimizer made outside of the scope, ON_READ or ONLY_FIRST_REPLICA variables). Or each "
    "makes an update of its own, and variables average what the replicas assign (MEAN).",
    evidence="Weights differ between replicas after the first step, and each replica's update follows its own local gradient; "
    "or all agree and follow one replica's; or they agree with one device once the gradients are put together where a tape "
    "makes them.",
    fix="Apply with a Keras optimizer made in strategy.scope(), or add up first:\n"
    "    g = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, g)",
    search=_search_missing_sum,
)

REPLICAS_DISAGREE = Cause(
    code="replicas-disagree",
    title="replicas drift apart",
    meaning="A variable that should be the same on every replica is not: something that only one replica sees changes it "
    "(an update that depends on the replica's number or rows, an assignment without aggregation).",
    evidence="Bits of every trainable variable on every replica after every step.",
    fix=_ALL_THE_SAME,
    search=_search_disagree,
)
