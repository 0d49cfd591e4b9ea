"""Gradients that are clipped on each replica before they are added up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from emulate.verify.arithmetic import explain
from emulate.verify.arrays import Floats, norm
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart
from emulate.verify.compare import compare
from emulate.verify.gradients import GradientView

_SEEN = 1e-6
"""From this relative difference on, clipping before and after the sum are told apart."""


def _search(case: Case) -> Sign | None:
    if case.base.first_step("gradient", "weight") is None:
        return None
    if not case.facts.clips:
        return _by_hand(case)
    return _from_numbers(case) or _from_rerun(case) or _from_norms(case) or _beside_others(case)


def _from_numbers(case: Case) -> Sign | None:
    """Gradients agree before the optimizer; clipped here or there they differ, from the step on in which the weights differ."""
    apart = case.base.first_step("weight")
    if apart is None or ((first := case.base.first_step("gradient")) is not None and first <= apart):
        return None
    for optimizer in case.base.runs.optimizers:
        limits = case.facts.clipping(optimizer)
        if not limits or case.base.steps[optimizer] <= apart:
            continue
        gaps = [_gap(case, optimizer, k, limits) for k in range(apart + 1)]
        if gaps[-1] > _SEEN and all(gap <= _SEEN for gap in gaps[:-1]):
            case.explain(lambda point: point.step > apart or (point.step == apart and point.measure.key.kind == "weight"))
            return _sign(case, limits, apart, gaps[-1])
    return None


def _sign(case: Case, limits: Mapping[str, float], step: int, gap: float) -> Sign:
    limit = ", ".join(f"{name}={value:g}" for name, value in limits.items())
    return Sign(
        f"Every replica clips its own gradient ({limit}) before they are added up, instead of clipping the sum.",
        f"The gradients agree up to the optimizer; in step {step}, the first whose weights differ, clipping before the "
        "sum gives a "
        f"gradient {gap:.2%} (L2) away from clipping after it"
        + (f"; clipping was not active in {'the step' if step == 1 else f'the {step} steps'} before" if step else ""),
        cure(next(iter(limits))),
    )


def _gap(case: Case, optimizer: str, step: int, limits: Mapping[str, float]) -> float:
    """Relative L2 difference of clipping each replica's gradient and clipping their sum."""
    seen = case.base.views(optimizer, step)
    replicas = sorted({replica for view in seen for replica in view.locals})
    before = [_clip(_locals(seen, replica), limits) for replica in replicas]
    after = _clip({view.tensor: view.reference for view in seen}, limits)
    apart = sum(norm(np.sum([one[n] for one in before if n in one], axis=0) - after[n]) ** 2 for n in after)
    whole = sum(norm(value) ** 2 for value in after.values())
    return float(np.sqrt(apart / whole)) if whole else 0.0


def _locals(seen: list[GradientView], replica: int) -> dict[str, Floats]:
    return {view.tensor: view.locals[replica] for view in seen if replica in view.locals}


def _clip(gradients: Mapping[str, Floats], limits: Mapping[str, float]) -> dict[str, Floats]:
    """As Keras does it: by value, by each tensor's norm, or by the norm of all."""
    if "clipvalue" in limits:
        return {n: np.clip(g, -limits["clipvalue"], limits["clipvalue"]) for n, g in gradients.items()}
    if "clipnorm" in limits:
        return {n: _scaled(g, norm(g), limits["clipnorm"]) for n, g in gradients.items()}
    whole = _whole(gradients)
    return {n: _scaled(g, whole, limits["global_clipnorm"]) for n, g in gradients.items()}


def _scaled(gradient: Floats, size: float, limit: float) -> Floats:
    return gradient * (limit / size) if size > limit else gradient


def _from_rerun(case: Case) -> Sign | None:
    """With clipping switched off in both runs the difference is gone, or the rest of it is explained."""
    if not _may_be_clipped(case):
        return None
    again = case.switched("no-clipping")
    if again is None or not again.points:
        return None
    gone = again.is_equivalent_but_for_kinks or again.first_step("initial-weight", "gradient", "weight") is None
    rest = explain(again)
    if not gone and (_has_tiny_factor(case) or not rest.fits or rest.unexplained or rest.weighted):
        return None
    first = case.base.exceeding[0]
    adds_up_itself = not gone and all(fit.replicated for fit in rest.fits)
    case.rebase(again, "no-clipping")
    if adds_up_itself:  # and clips the sum of what is wrong for another reason
        case.notes.append("gradients, weights and losses were compared with clipping switched off in both runs")
        return None
    alike = "gradients and weights agree" if again.exceeding else "all that was compared agrees"
    left = alike if gone else "what still differs has another cause"
    return Sign(
        _SUMMARY,
        f"From step {first.step} on {first.measure.key.tensor} ({first.measure.key.kind}) is {first.ratio:.0f} times the noise "
        f"floor away; with clipping switched off in both runs {left}",
        _cure_of(case),
    )


def _may_be_clipped(case: Case) -> bool:
    """Whether something differs that a simpler model does not explain: clipped local gradients have any factor."""
    found = case.explanation
    return bool(found.unexplained or found.weighted) or not found.fits or _has_tiny_factor(case)


def _has_tiny_factor(case: Case) -> bool:
    """Whether a few numbers are too large by a factor: every replica's limit, added up, has that factor too."""
    return any(fit.is_tiny for fit in case.explanation.scaled)


def _from_norms(case: Case) -> Sign | None:
    """Where it could not be run again: every local gradient and the reference's have the same norm, the limit."""
    for fit in case.explanation.weighted if case.facts.clipped_by else ():
        seen = case.base.views(fit.optimizer, fit.step)
        norms = [_whole(_locals(seen, replica)) for replica in fit.shares]
        limit = _whole({view.tensor: view.reference for view in seen})
        if all(abs(size / limit - 1) < _SEEN * 10 for size in norms):
            case.explain_fits([fit])
            return Sign(
                _SUMMARY,
                f"In step {fit.step} the gradient of each replica and of one device have the same norm, {limit:.5g}",
                _cure_of(case),
            )
    return None


def _beside_others(case: Case) -> Sign | None:
    """Behind something else that is wrong: other gradients on each replica, all of them as long as one device's, the limit.

    What is wrong besides is looked for with clipping switched off in both runs.
    """
    first = case.base.first_step("gradient")
    if not case.facts.clipped_by or first is None:
        return None
    for optimizer in case.base.runs.optimizers:
        seen = case.base.views(optimizer, first) if case.base.steps[optimizer] > first else []
        replicas = sorted({replica for view in seen for replica in view.locals})
        norms = [_whole(_locals(seen, replica)) for replica in replicas]
        limit = _whole({view.tensor: view.reference for view in seen})
        if len(norms) < 2 or any(abs(size / limit - 1) > _SEEN * 10 for size in norms):
            continue
        one, other = (_locals(seen, replica) for replica in replicas[:2])
        apart = max((norm(one[name] - other[name]) for name in one if name in other), default=0.0)
        again = case.switched("no-clipping") if apart > _SEEN * limit else None
        if again is None or not again.points:
            continue
        case.rebase(again, "no-clipping")
        case.notes.append("gradients, weights and losses were compared with clipping switched off in both runs")
        return Sign(
            _SUMMARY,
            f"In step {first} the gradients of the replicas are not the same, and each has the norm that one device's has, "
            f"{limit:.5g}",
            _cure_of(case),
        )
    return None


def _by_hand(case: Case) -> Sign | None:
    """Without a clipping that is known: the losses agree, and each replica's gradient was changed for itself."""
    first = case.base.first_step("gradient")
    found = case.explanation
    by_weights = [fit for fit in found.weighted if not case.are_counts(fit)]
    if first is None or not (by_weights or any(step == first for _, step in found.unexplained)):
        return None
    objectives = [point for point in case.base.objectives if point.step == first]
    if not objectives or any(point.exceeds for point in objectives):
        return None
    agrees = rebase_on_replicas_apart(case, first)
    if agrees is None:
        return None
    return Sign(
        "Every replica clips or normalizes its own gradient before they are added up, instead of the sum.",
        f"In step {first} the loss agrees, and the gradients that enter the optimizer do not; {agrees}",
    )


def _behind(case: Case) -> Sign | None:
    """What enters the optimizer is clipped, and the loss is not: on each replica, as all that it does with its own rows."""
    if case.clips_the_sum:
        return None
    again = case.switched("no-clipping", alone=True) if case.facts.clipped_by else None
    if again is None:
        return None
    found = compare(again.runs.topology, case.topology)
    first = found.first_step("gradient")
    if first is None or any(point.exceeds for point in found.objectives if point.step <= first):
        return None
    most = max(p.measure.relative for p in found.points if p.measure.key.kind == "gradient" and p.step == first)
    if most <= _SEEN:
        return None
    return Sign(
        _SUMMARY,
        f"In step {first} the loss is the same with clipping switched off, and the gradients that enter the optimizer are "
        f"{most:.2%} (L2) away; one device on the rows of one replica after the other clips them too",
        _cure_of(case),
    )


def _whole(gradients: Mapping[str, Floats]) -> float:
    return float(np.sqrt(sum(norm(g) ** 2 for g in gradients.values()))) or 1.0


def _cure_of(case: Case) -> str:
    """The cure for what the program clips by: the sum is to be clipped in the same way."""
    if case.facts.distributed:
        return _BY_THE_OPTIMIZER
    of_optimizers = [option for optimizer in case.facts.optimizers for option in case.facts.clipping(optimizer)]
    option = next(iter([*(_OPTIONS[name] for name in case.facts.clipped_by), *of_optimizers]), "global_clipnorm")
    if "tape" in case.topology.optimizers:
        how = "MEAN" if case.comparison.runs.how("tape") == "mean" else "SUM"
        return _BY_HAND.format(how=how, clipped=_CLIPPED_SUMS[option])
    return cure(option)


_OPTIONS = {"clip_by_global_norm": "global_clipnorm", "clip_by_norm": "clipnorm", "clip_by_value": "clipvalue"}


def cure(option: str) -> str:
    """The cure for one of Keras's options."""
    return _FIX.replace(_CLIPPED_SUM, _CLIPPED_SUMS[option]) + (
        "with an optimizer that has no clipping option of its own. With Keras's fit that is a train_step of one's own; or leave"
        " it to gpudist_core: gd.distributed(model) lets the optimizer clip what all replicas add up to."
    )


_CLIPPED_SUM = "grads, _ = tf.clip_by_global_norm(grads, LIMIT)"
_CLIPPED_SUMS = {
    "global_clipnorm": _CLIPPED_SUM,
    "clipnorm": "grads = [tf.clip_by_norm(g, LIMIT) for g in grads]",
    "clipvalue": "grads = [tf.clip_by_value(g, -LIMIT, LIMIT) for g in grads]",
}
_FIX = (
    "Add up, clip, and hand on an equal share:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)\n"
    f"    {_CLIPPED_SUM}\n"
    "    optimizer.apply_gradients((g / context.num_replicas_in_sync, v) for g, v in zip(grads, variables))\n"
)
_BY_HAND = (
    "Put the replicas' gradients together first, clip them, and make the update of them as they are:\n"
    "    context = tf.distribute.get_replica_context()\n"
    "    grads = context.all_reduce(tf.distribute.ReduceOp.{how}, grads)\n"
    "    {clipped}"
)
_BY_THE_OPTIMIZER = (
    "Leave the clipping to the optimizer: gd.distributed lets it clip what all replicas add up to.\n"
    "    model.compile(keras.optimizers.Adam(global_clipnorm=LIMIT), ...)  # or clipnorm, clipvalue"
)
_SUMMARY = "Every replica clips its own gradient before they are added up, instead of clipping the sum."


CLIP_BEFORE_REDUCE = Cause(
    code="clip-before-reduce",
    title="clipping before the sum",
    meaning="clipnorm, global_clipnorm, clipvalue and tf.clip_by_* inside the step act on each replica's own gradient, "
    "before "
    "the replicas are added up. The clipped parts do not add up to the clipped sum; a replica's share of the norm is "
    "smaller, "
    "so the limit acts later or stronger. Keras's optimizers do it in this order.",
    evidence="The gradients agree before clipping, the weights differ from the first step on in which clipping is "
    "active; or all "
    "agrees once clipping is switched off.",
    fix=cure("global_clipnorm"),
    search=_search,
    behind=_behind,
)
