"""Detect replicas that are missing, start differently or drift apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from emulate.recorder import TAPES_JOINED
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.arithmetic import ROUND, factor_of_updates, one_factor
from emulate.verify.case import Case, Disagreement
from emulate.verify.causes.cause import GENERAL, Cause, Sign, names_in_words, numbers
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import Floats, StepOfAll, aligned, gradients_of, largest, names_of, weight_of, weights_before
from emulate.verify.lines import Blame, made, made_apart, operations

_DEFAULT = "_DefaultDistributionStrategy"
"""TensorFlow's name of the default strategy, if a program creates none."""


def _search_replicas(case: Case) -> Sign | None:
    topology = case.untouched.topology
    strategies = {str(event["name"]) for _, event in case.untouched.of("strategy")} - {_DEFAULT}
    if not case.untouched.of("step"):
        return None
    if topology.num_ps:
        return _without_servers(topology, strategies)
    wanted, have = topology.num_replicas, case.num_replicas
    if have >= wanted:
        return None
    name = ", ".join(sorted(strategies)) or "no strategy"
    who = name if strategies else "The default strategy"
    where = f" on each of {topology.num_hosts} hosts" if topology.num_hosts > 1 else ""
    evidence = f"{who} has num_replicas_in_sync = {have}{where}; {topology} has {wanted} devices"
    evidence += f"; the program hides GPUs ({case.outcome.hides})" if case.outcome.hides else ""
    fix = _HIDDEN if case.outcome.hides else None if strategies else _OF_A_SCOPE
    if topology.num_hosts > 1:
        own = f"Each of the {topology.num_hosts} hosts trains its own model ({name})."
        return Sign(own, evidence, fix, then=lambda: case.cut(0, "every host trains its own model"))
    return Sign(f"Only {have} of {wanted} devices train ({name}); the others are idle.", evidence, fix)


def _without_servers(topology: Topology, strategies: set[str]) -> Sign | None:
    """Check whether the coordinator trains alone, whatever workers and servers there are."""
    if any("ParameterServer" in name for name in strategies):
        return None
    name = ", ".join(sorted(strategies)) or "no strategy"
    return Sign(
        f"No worker and no parameter server of {topology} is used: the coordinator trains alone ({name}).",
        f"The program created {name}, but no ParameterServerStrategy",
        _OF_SERVERS,
    )


_HIDDEN = "If the program hides GPUs"
_OF_A_SCOPE = "If there is no strategy"
_OF_SERVERS = "If no parameter server is used"

# The first that the program makes: TensorFlow makes others for itself in its scope.
_FIRST_STRATEGY = Blame("start", lambda lines: lines.made("strategy")[::-1])

REPLICAS_MISSING = Cause("replicas-missing", _search_replicas, runs_that_ended=True, blame=(_FIRST_STRATEGY,))


_FOLLOWS = 0.95
"""From this part of the telling elements on, an update follows a gradient."""
_TELLING = 16


def _variables(apart: Disagreement) -> str:
    more = apart.tensors - 1
    return apart.tensor + (f" and {more} more variable{'s' if more > 1 else ''}" if more else "")


def _search_initial(case: Case) -> Sign | None:
    apart = case.agreement.initial
    if apart is not None:
        return Sign(
            f"Replicas start with different weights: {_variables(apart)}.",
            f"Bits of the initial {apart.tensor}: {_groups(apart)} agree only among themselves",
            then=lambda: _cut_at_the_start(case, "the replicas start with different weights"),
        )
    first = next((p for p in case.comparison.exceeding if p.measure.key.kind == "initial-weight"), None)
    if first is None:
        return None
    name, m = first.measure.key.tensor, first.measure
    differs = f"the initial {name} differs by up to {m.error:.3g} ({m.in_print[0]}, {m.in_print[1]} on one device)"
    # The agreement of replicas covers trained variables alone.
    if len({values[name].digest for values in case.untouched.variables("initial").values() if name in values}) > 1:
        return Sign(
            f"The hosts start with different values of {name}, which no optimizer trains, and one device with another one.",
            f"{differs}, and is not the same on all hosts",
            then=lambda: _cut_at_the_start(case, f"the hosts start with different values of {name}"),
        )
    return Sign(
        f"The run starts with other weights than one device ({name}), although the seeds are the same.",
        f"{differs}; two runs on one device agree",
        blame=[Blame("assigned", lambda lines: [record for record in lines.of("assigned") if record.get("name") == name])],
        then=case.explain_start,
    )


def _cut_at_the_start(case: Case, why: str) -> None:
    case.cut(0, why)
    case.explain_start()


def _search_missing_sum(case: Case) -> Sign | None:
    apart = case.agreement.first
    if apart is not None and apart.optimizer is not None and case.agreement.initial is None:
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
        of = f"{min(follows):.1%} of the elements where its gradient and the sum have opposite signs"
        how = f"follows its own gradient in {of}"
    elif all(_is_of_own(case.untouched, optimizer, k, replica) for replica in step):
        how = "is a multiple of its own gradient, and none of the sum"
    else:
        return None
    variables = f"{apart.tensors} variables differ" if apart.tensors > 1 else f"{apart.tensor} differs"
    return Sign(
        "Gradients are not summed over the replicas: each replica trains its own model.",
        f"After step {k} {variables} between replicas, and each replica's update {how}",
        _OUTSIDE if any(local.outside for local in step.values()) else None,
        tensors=[apart.tensor],
        then=lambda: case.cut(k, "the replicas' weights differ", at=("gradient", "loss")),
    )


def _is_of_own(trace: Trace, optimizer: str, k: int, replica: int) -> bool:
    """Return whether a replica's update is a multiple of its own gradient, and none of the sum."""
    step = complete(trace, optimizer)[k]
    updates = [_update(trace, optimizer, k, replica, step, tensor) for tensor in names_of(step)]
    usable = [pair for pair in updates if pair is not None and replica in pair[1]]
    of_sum = one_factor([(update, np.sum(list(gradients.values()), axis=0)) for update, gradients in usable])
    return of_sum is None and one_factor([(update, gradients[replica]) for update, gradients in usable]) is not None


def _all_follow_one(case: Case) -> Sign | None:
    """Check whether the replicas agree, but the update uses one replica's gradient only."""
    k = case.base.first_step("weight")
    early = case.base.first_step("gradient", "initial-weight")
    if k is None or (early is not None and early <= k):
        return None
    for optimizer in case.base.runs.optimizers:
        step = next(iter(complete(case.base.runs.topology, optimizer)[k : k + 1]), {})
        out = {p.measure.key.tensor for p in case.base.exceeding if p.step == k and p.measure.key.optimizer == optimizer}
        some = [tensor for tensor in names_of(step) if tensor in out]
        for tensors in (names_of(step), some) if len(step) > 1 else ():
            if (sign := _of_one_replica(case, optimizer, k, tensors)) is not None:
                return sign
    return None


def _of_one_replica(case: Case, optimizer: str, k: int, tensors: Sequence[str]) -> Sign | None:
    """Check whether the update of these tensors (all, or those that differ) uses one replica's gradient only."""
    topology = case.base.runs.topology
    step = complete(topology, optimizer)[k]
    shares = {r: _share(topology, optimizer, k, min(step), r, tensors) for r in step}
    followed = [r for r, share in shares.items() if share is not None and share >= _FOLLOWS]
    replica = followed[0] if len(followed) == 1 else _whose_update(case, topology, optimizer, k, min(step), tensors)
    if replica is None:
        return None
    whose = "" if len(tensors) == len(names_of(step)) else f" of {names_in_words(tensors)}"
    return Sign(
        f"Gradients{whose} are not summed over the replicas: all replicas apply the gradient of replica {replica}.",
        f"In step {k} the replicas' gradients add up to that of one device, but the update{whose} "
        + (
            (
                f"follows replica {replica}'s gradient in {shares[replica]:.1%} of the elements where it and the sum have "
                "opposite signs"
            )
            if followed
            else f"is the same multiple of replica {replica}'s gradient as on one device of its gradient"
        ),
        _OUTSIDE if any(local.outside for local in step.values()) else None,
        tensors=tensors,
        then=lambda: case.explain_update(k),
    )


def _whose_update(
    case: Case, topology: Trace, optimizer: str, k: int, updated: int, tensors: Sequence[str] | None = None
) -> int | None:
    """Return the replica whose gradient, times one device's factor, makes a replica's update."""
    reference = case.base.runs.reference
    step, steps = complete(topology, optimizer)[k], complete(reference, optimizer)
    if len(steps) <= k:
        return None
    ours = [_update(topology, optimizer, k, updated, step, tensor) for tensor in tensors or names_of(step)]
    alone = steps[k]
    theirs = [_update(reference, optimizer, k, min(alone), alone, tensor) for tensor in tensors or names_of(alone)]
    wanted = one_factor([(pair[0], np.sum(list(pair[1].values()), axis=0)) for pair in theirs if pair is not None])
    factors = {r: one_factor([(pair[0], pair[1][r]) for pair in ours if pair is not None and r in pair[1]]) for r in step}
    matching = [r for r, factor in factors.items() if factor and wanted and abs(factor / wanted - 1) < ROUND]
    return matching[0] if len(matching) == 1 else None


_OUTSIDE = "If the update is outside of Strategy.run"


def _averages_updates(case: Case) -> Sign | None:
    """Check whether the replicas agree because the variables average hand-made updates of each replica's gradient.

    That is right for what is linear in the gradients alone, so one factor says nothing; with the gradients of all replicas put
    together where the tapes make them it is gone.
    """
    k, early = case.base.first_step("weight"), case.base.first_step("gradient", "initial-weight", "variable")
    if k is None or case.facts.clips or case.facts.clipped_by or (early is not None and early < k):
        return None
    out = [p for p in case.base.exceeding if p.step == k and p.measure.key.kind in ("gradient", "weight")]
    if any(p.measure.key.kind == "gradient" or p.measure.key.optimizer != "tape" for p in out):
        return None
    again = case.switch(TAPES_JOINED[case.base.runs.how("tape")])
    later = None if again is None else again.first_step("initial-weight", "gradient", "weight", "variable")
    if again is None or not again.points or (later is not None and later <= k):
        return None
    first = next(p for p in out if p.measure.key.kind == "weight")
    is_outside = any(local.outside for local in complete(case.base.runs.topology, "tape")[k].values())
    return Sign(
        "Gradients are not summed over the replicas: "
        + (
            "the update outside of Strategy.run does not use their sum."
            if is_outside
            else "each replica computes its own update, and the variables average what the replicas assign."
        ),
        (
            f"In step {k} the replicas' gradients add up to that of one device, but {first.measure.key.tensor} "
            f"differs by {first.ratio:.0f}x the noise floor; if gpudist combines the gradients of all replicas right "
            "behind the tape, "
        )
        + ("everything agrees" if later is None else f"it agrees up to step {later - 1}"),
        _OUTSIDE if is_outside else _OF_UPDATES,
        tensors=[first.measure.key.tensor],
        then=lambda: case.explain_update(k),
    )


_OF_UPDATES = "If variables average the updates"


def _share(
    trace: Trace, optimizer: str, k: int, updated: int, source: int, tensors: Sequence[str] | None = None
) -> float | None:
    """Return the fraction of elements in which one replica's update opposes another's (or its own) local gradient.

    Telling are elements whose local gradient and sum of gradients have opposite signs, both well above zero.
    """
    step = complete(trace, optimizer)[k]
    right, telling = 0, 0
    for tensor in tensors or names_of(step):
        pair = _update(trace, optimizer, k, updated, step, tensor)
        if pair is None or source not in pair[1]:
            continue
        update, gradients = pair
        own, whole = gradients[source], np.sum(list(gradients.values()), axis=0)
        at = (own * whole < 0) & (np.abs(own) > 1e-3 * largest(own)) & (np.abs(whole) > 1e-3 * largest(whole)) & (update != 0)
        right += int((update[at] * own[at] < 0).sum())
        telling += int(at.sum())
    return right / telling if telling >= _TELLING else None


def _update(
    trace: Trace, optimizer: str, k: int, replica: int, step: StepOfAll, tensor: str
) -> tuple[Floats, Mapping[int, Floats]] | None:
    """Return how a step changed one tensor on one replica, and the local gradients of all."""
    after = weight_of({replica: step[replica]}, tensor) or weight_of(step, tensor)
    before = weights_before(trace, optimizer, k, tensor, replica)
    stored = gradients_of(step, tensor)
    if after is None or before is None or not stored or after.shape != before.shape:
        return None
    new, old, *gradients = aligned([after, before, *stored.values()])
    return new - old, dict(zip(stored, gradients, strict=True))


def _search_disagree(case: Case) -> Sign | None:
    apart = case.agreement.first
    if apart is None:
        return None
    # What the step itself assigns may be in its loss: that of a layer that sets its weights by the first examples, or of a step
    # that takes a second gradient at other weights (SAM). No replay of such a gradient says anything of the examples.
    is_own = any(record.get("name") == apart.tensor for record in case.lines.of("assigned"))
    follows = ("loss", *["gradient"] * (case.find_first_unexplained() == apart.step)) if is_own else ()
    kinds = [kind for kind in ("gradient", "loss") if kind not in follows]
    # A step that ends with the data is counted by some replicas' optimizers, and those of others come too late.
    by_factor = _by_what_factor(case.untouched, apart)
    ends = [report.made for report in case.untouched.reports if report.name.startswith("epoch/") and report.made]
    return Sign(
        f"From step {apart.step} on the replicas do not agree on {_variables(apart)}.",
        f"Bits of {apart.tensor} after step {apart.step}: {_groups(apart)} agree only among themselves; before, "
        f"all agreed{by_factor}",
        [_OF_AN_END, GENERAL] if min(ends, default=np.inf) <= apart.step and case.untouched.num_hosts == 1 else None,
        # Of one factor is a learning rate, or another number that no optimizer trains.
        blame=[of_whom("update", "assign", trainable=False) for of_whom in (made_apart, made)] if by_factor else [],
        tensors=[apart.tensor],
        then=lambda: case.cut(apart.step, "the replicas' weights differ", at=kinds),
    )


_OF_AN_END = "From the second epoch of Keras fit on"


def _by_what_factor(trace: Trace, apart: Disagreement) -> str:
    """Return the factor between two replicas' updates, if there is one: a different learning rate."""
    if apart.optimizer is None:
        return ""
    step = complete(trace, apart.optimizer)[apart.step]
    first, other = (int(group[0].rsplit(" ", 1)[1]) for group in apart.groups[:2])
    factor = factor_of_updates(
        [
            weights_before(trace, apart.optimizer, apart.step, tensor, first),
            *(weight_of({replica: step[replica]}, tensor) for replica in (other, first)),
        ]
        for tensor in names_of(step)
    )
    if factor is None or abs(factor - 1) < ROUND:
        return ""
    return f"; in that step every weight changes {factor:.4g}x as much on replica {other} as on replica {first}"


def _groups(apart: Disagreement) -> str:
    return numbers([f"({', '.join(group[:4])}{', ...' if len(group) > 4 else ''})" for group in apart.groups[:4]])


INITIAL_WEIGHTS = Cause(
    "initial-weights",
    _search_initial,
    unless=("unseeded-randomness", "replicas-missing"),
    blame=(
        made_apart("start", "assign", trainable=True),
        made_apart("start", "restore"),
        made("start", "num_replicas", in_step=False),
    ),
)

MISSING_ALL_REDUCE = Cause(
    "missing-all-reduce",
    _search_missing_sum,
    unless=("replicas-missing",),
    blame=(operations("update", "apply"), operations("assigned", "assign"), made("update", "apply")),
)

REPLICAS_DISAGREE = Cause(
    "replicas-disagree",
    _search_disagree,
    unless=("missing-all-reduce", "replicas-missing", "initial-weights"),
    blame=(operations("assigned", "assign"), operations("update", "apply")),
)
