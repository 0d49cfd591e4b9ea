"""Detect gradients that are changed before they are summed: clipped, applied several batches at once, or sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from emulate.told import told
from emulate.trace import Trace
from emulate.verify.arithmetic import ROUND, Fit, explain, one_factor
from emulate.verify.case import Case
from emulate.verify.causes.cause import GENERAL, OF_GROUPS, Sign, as_factor, names_in_words, numbers, steps_in_words
from emulate.verify.causes.replays import REPLAY
from emulate.verify.causes.updates import factor_of
from emulate.verify.compare import compare
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import Floats, GradientView, aligned, gradients_of, norm, objective, weight_of, weights_before
from emulate.verify.lines import between, operations

_SEEN = 1e-6
"""From this relative difference on, clipping before the sum and after it are different."""


def of_clipping(case: Case) -> Sign | None:
    """Look for gradients that each replica clips, as the program or its optimizer says."""
    if case.is_of_groups:
        return Sign(_SUMMARY, OF_GROUPS, _fix_of_clipping(case)) if case.facts.clips else None
    if not case.facts.clips or case.without("no-clipping"):
        return None
    if case.base.first_step("gradient", "weight") is None or case.joins is not None:
        return None
    return _from_numbers(case) or _from_rerun(case) or _from_norms(case) or _beside_others(case)


def _from_numbers(case: Case) -> Sign | None:
    """Compare gradients, equal before the optimizer, after clipping: from the step on in which the weights differ."""
    apart = case.base.first_step("weight")
    if apart is None or ((first := case.base.first_step("gradient")) is not None and first <= apart):
        return None
    for optimizer in case.base.runs.optimizers:
        limits = case.facts.clipping(optimizer)
        if not limits or case.base.steps[optimizer] <= apart:
            continue
        gaps = []  # the relative L2 differences between clipping each replica's gradient and clipping the sum
        for together, after in (_clipped(case, optimizer, k, limits) for k in range(apart + 1)):
            gaps.append(sum(norm(together[n] - after[n]) ** 2 for n in after) ** 0.5 / _whole(after))
        if gaps[-1] > _SEEN and all(gap <= _SEEN for gap in gaps[:-1]):
            return _of_limits(case, optimizer, limits, apart, gaps[-1])
    return None


def _take_out(case: Case, optimizer: str, step: int, limits: Mapping[str, float]) -> None:
    """Mark what clipping before the sum explains of an update: that is all of it, or another cause is left.

    The numbers tell it of an optimizer whose update is a multiple of its gradient. Of others runs without clipping do; where
    they cannot be made, a limit that the numbers show is taken for the only cause.
    """
    together, after = _clipped(case, optimizer, step, limits)
    ours = _rate(case, case.base.runs.topology, optimizer, step, together)
    theirs = _rate(case, case.base.runs.reference, optimizer, step, after)
    if ours is not None and theirs is not None and abs(ours / theirs - 1) < ROUND:
        case.explain_update(step)
        return
    again = case.switch("no-clipping")
    if again is not None and again.points:
        case.rebase(again, "no-clipping", _UNCLIPPED)
    elif theirs is None:
        case.explain_update(step)


def _rate(case: Case, trace: Trace, optimizer: str, step: int, gradients: Mapping[str, Floats]) -> float | None:
    """Return the one number by which a run's update of some variables is their gradients; None where it is none."""
    changes: list[tuple[Floats, Floats]] = []
    for tensor, gradient in gradients.items():
        stored = [
            weights_before(case.base.runs.reference, optimizer, step, tensor),
            weight_of(complete(trace, optimizer)[step], tensor),
        ]
        recorded = [array for array in stored if array is not None]
        before, after = aligned(recorded) if len(recorded) == len(stored) else (gradient[:0], gradient[:0])
        if len(before) != len(gradient):
            return None
        changes.append((after - before, gradient))
    return one_factor(changes)


def _of_limits(case: Case, optimizer: str, limits: Mapping[str, float], step: int, gap: float) -> Sign:
    limit = ", ".join(f"{name}={value:g}" for name, value in limits.items())
    return Sign(
        f"Each replica clips its own gradient ({limit}) before the gradients are summed. The sum must be clipped instead.",
        (
            f"The gradients agree before the optimizer. In step {step}, the first in which the weights differ, "
            f"clipping before the sum gives a gradient that is {100 * gap:.3g}% (L2) off from clipping after it"
        )
        + (f"; clipping was not active in {'the step' if step == 1 else f'the {step} steps'} before" if step else ""),
        _of_option(next(iter(limits))),
        then=lambda: _take_out(case, optimizer, step, limits),
    )


def _clipped(case: Case, optimizer: str, step: int, limits: Mapping[str, float]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the sum of the replicas' clipped gradients, and the clipped sum."""
    views = case.base.views(optimizer, step)
    replicas = sorted({replica for view in views for replica in view.locals})
    before = [_clip(_locals(views, replica), limits) for replica in replicas]
    after = _clip({view.tensor: view.reference for view in views}, limits)
    return {n: np.sum([clipped[n] for clipped in before if n in clipped], axis=0) for n in after}, after


def _locals(views: list[GradientView], replica: int) -> dict[str, Floats]:
    return {view.tensor: view.locals[replica] for view in views if replica in view.locals}


def _clip(gradients: Mapping[str, Floats], limits: Mapping[str, float]) -> dict[str, Floats]:
    """Clip as Keras does: by value, by each tensor's norm, or by the global norm."""
    if "clipvalue" in limits:
        return {n: np.clip(g, -limits["clipvalue"], limits["clipvalue"]) for n, g in gradients.items()}
    if "clipnorm" in limits:
        return {n: _scaled(g, norm(g), limits["clipnorm"]) for n, g in gradients.items()}
    whole = _whole(gradients)
    return {n: _scaled(g, whole, limits["global_clipnorm"]) for n, g in gradients.items()}


def _scaled(gradient: Floats, size: float, limit: float) -> Floats:
    return gradient * (limit / size) if size > limit else gradient


def _from_rerun(case: Case) -> Sign | None:
    """Check whether the difference is gone, or the rest is explained, with clipping switched off in both runs."""
    explanation = case.explain_gradients()
    # Where a simpler model explains all, nothing is clipped: a loss has one factor, and its gradients have it too. Clipped
    # gradients have another one in each step, or one that their losses have not.
    is_simple = explanation.fits and not (explanation.unexplained or explanation.weighted or _has_tiny_factor(case))
    factors = [fit.scale for fit in explanation.scaled]
    is_one = all(abs(factor / factors[0] - 1) <= ROUND for factor in factors)
    apart = {point.step for point in case.base.exceeding if point.measure.key.kind == "gradient"}
    if is_simple and is_one and not (factors and case.losses_agree(apart)):
        return None
    again = case.switch("no-clipping")
    if again is None or not again.points:
        return None
    gone = again.is_equivalent or again.first_step("initial-weight", "gradient", "weight") is None
    rest = explain(again)
    is_open = not rest.fits or rest.unexplained or not all(case.are_counts(fit) for fit in rest.weighted)
    if not gone and (_has_tiny_factor(case) or is_open):
        return None
    first = case.base.exceeding[0]
    # Keras clips what was recorded already: where gradients differ first, it is not the reason, and what agrees without it is
    # another training.
    if gone and not case.facts.clipped_by and first.measure.key.kind == "gradient":
        return None
    if not gone and all(fit.replicated or fit.taped for fit in rest.fits):
        # It adds up by itself, and clips the sum of what is wrong for another reason.
        return Sign(then=lambda: case.rebase(again, "no-clipping", _UNCLIPPED))
    alike = "gradients and weights agree" if again.exceeding else "everything agrees"
    left = alike if gone else "the remaining difference has another cause"
    return Sign(
        _SUMMARY,
        f"From step {first.step} on {first.measure.key.tensor} ({first.measure.key.kind}) differs by "
        f"{first.ratio:.0f}x the noise floor; with clipping switched off in both runs {left}",
        _fix_of_clipping(case),
        then=lambda: case.rebase(again, "no-clipping"),
    )


_UNCLIPPED = told("without-clipping")("gradients, weights and losses were compared with clipping switched off in both runs")


def _has_tiny_factor(case: Case) -> bool:
    """Return whether a few numbers are too large by a factor: the sum of all replicas' limits has that factor, too."""
    return any(fit.is_tiny for fit in case.explain_gradients().scaled)


def _from_norms(case: Case) -> Sign | None:
    """Check, without a re-run, whether every local gradient and the reference's have the same norm, the limit."""
    weighted = case.explain_gradients().weighted if case.facts.clipped_by else ()
    limits = [(fit, _clipped_to(case.base.views(fit.optimizer, fit.step), list(fit.shares))) for fit in weighted]
    clipped = [(fit, limit) for fit, limit in limits if limit is not None]
    if not clipped:
        return None
    first, limit = clipped[0]
    return Sign(
        _SUMMARY,
        f"In step {first.step} the gradient of each replica has the same norm as that of one device, {limit:.5g}: the limit",
        _fix_of_clipping(case),
        then=partial(case.explain_fits, [fit for fit, _ in clipped]),
    )


def _beside_others(case: Case) -> Sign | None:
    """Find clipping behind another error: each replica has a different gradient, all with the same norm, the limit.

    What is wrong besides is looked for with clipping switched off in both runs.
    """
    first = case.base.first_step("gradient")
    if not case.facts.clipped_by or first is None:
        return None
    for optimizer in case.base.runs.optimizers:
        views = case.base.views(optimizer, first) if case.base.steps[optimizer] > first else []
        replicas = sorted({replica for view in views for replica in view.locals})
        limit = _clipped_to(views, replicas)
        again = case.switch("no-clipping") if limit is not None else None
        if again is None or not again.points:
            continue
        return Sign(
            _SUMMARY,
            f"In step {first} the replicas have different gradients, but each has the same norm as that of one "
            f"device, {limit:.5g}: the limit",
            _fix_of_clipping(case),
            then=partial(case.rebase, again, "no-clipping", _UNCLIPPED),
        )
    return None


def _clipped_to(views: list[GradientView], replicas: Sequence[int]) -> float | None:
    """Return the norm of every replica's gradient and of the reference's, the limit; None where it is not the same.

    Equal gradients are those of a program that sums them itself, and clips the sum.
    """
    locals_ = [_locals(views, replica) for replica in replicas]
    limit = _whole({view.tensor: view.reference for view in views})
    if len(locals_) < 2 or any(abs(_whole(local) / limit - 1) > _SEEN * 10 for local in locals_):
        return None
    first, other = locals_[:2]
    apart = max((norm(first[name] - other[name]) for name in first if name in other), default=0.0)
    return limit if apart > _SEEN * limit else None


def of_dropped_gradients(case: Case) -> Sign | None:
    """Look for steps that one device drops, and in which some replicas drop their gradients and others do not."""
    found: list[tuple[Fit, list[int]]] = []
    gradients = [point.measure for point in case.base.exceeding if point.measure.key.kind == "gradient"]
    for place in dict.fromkeys((one.key.optimizer, one.step) for one in gradients if one.reference_value == 0):
        views = case.base.views(*place)
        replicas = sorted({replica for view in views for replica in view.locals})
        dropped = [replica for replica in replicas if not any(local.any() for local in _locals(views, replica).values())]
        if 0 < len(dropped) < len(replicas) and not any(view.reference.any() for view in views):
            found.append((Fit(*place), dropped))
    asks = operations("given", "finite")
    if not found or not asks.find(case.lines):
        return None
    fits = [fit for fit, _ in found]
    return Sign(
        "Each replica drops its own gradients before they are summed, and the others keep theirs. One device drops the whole "
        "step.",
        f"{steps_in_words(fits)}: all gradients of one device are 0; in step {fits[0].step} those of replica "
        f"{numbers(found[0][1])} are 0, too, and those of the others are not",
        DROPPED,
        blame=(asks,),
        then=partial(case.explain_fits, fits),
    )


def of_clipping_behind(case: Case) -> Sign | None:
    """Check whether the optimizer's input is clipped and the loss is not, on each replica."""
    if case.clips_the_sum:
        return None
    again = case.switch("no-clipping", alone=True) if case.facts.clipped_by else None
    if again is None:
        return None
    comparison = compare(again.runs.topology, case.topology)
    first = comparison.first_step("gradient")
    if first is None or any(point.exceeds for point in comparison.objectives if point.step <= first):
        return None
    most = max(p.measure.relative for p in comparison.points if p.measure.key.kind == "gradient" and p.step == first)
    if most <= _SEEN:
        return None
    return Sign(
        _SUMMARY,
        f"In step {first} the loss is the same with clipping switched off, but the gradients that enter the "
        f"optimizer change by {100 * most:.3g}% (L2); {REPLAY} clips them too",
        _fix_of_clipping(case),
    )


def _whole(gradients: Mapping[str, Floats]) -> float:
    return float(np.sqrt(sum(norm(g) ** 2 for g in gradients.values()))) or 1.0


def _fix_of_clipping(case: Case) -> str:
    """Return the fix for what the program clips by: the sum must be clipped in the same way."""
    if case.facts.distributed:
        return _BY_THE_OPTIMIZER
    if "tape" in case.topology.optimizers:
        return _BY_HAND
    of_optimizers = [option for optimizer in case.facts.optimizers for option in case.facts.clipping(optimizer)]
    return _of_option(next(iter([*(_OPTIONS[name] for name in case.facts.clipped_by), *of_optimizers]), "global_clipnorm"))


def _of_option(option: str) -> str:
    """Return the heading of the fix for one of Keras's options."""
    return GENERAL if option == "global_clipnorm" else option


_OPTIONS = {"clip_by_global_norm": "global_clipnorm", "clip_by_norm": "clipnorm", "clip_by_value": "clipvalue"}
DROPPED = "If each replica drops gradients that are not finite"
_BY_HAND = "If you write the update yourself"
_BY_THE_OPTIMIZER = "With gd.distributed"
_SUMMARY = "Each replica clips its own gradient before the gradients are summed. The sum must be clipped instead."


def of_several_batches(case: Case) -> Sign | None:
    """Look for batches that one update adds up, more of them than on one device."""
    for optimizer in case.base.runs.optimizers:
        ours, theirs = case.base.runs.batches(optimizer)
        if ours != theirs:
            count = f"{ours} on {case.num_replicas} replicas, {theirs} on one device"
            fits = [fit for fit in case.explain_gradients().fits if fit.optimizer == optimizer]
            sign = _added_up(case, fits, ours / theirs, count) or _decayed(case, fits, count)
            sign = sign or _changed(case, optimizer, ours / theirs, count)
            if sign is not None:
                return sign
    return None


def _added_up(case: Case, fits: list[Fit], ratio: float, count: str) -> Sign | None:
    """Check whether the step grows with the number of its batches."""
    if not fits or any(abs(fit.scale / ratio - 1) > ROUND or fit.shares or fit.replicated for fit in fits):
        return None
    return Sign(
        f"Gradients of several batches are summed for one update and not divided by the number of batches: {count}.",
        f"gradient / gradient of one device = {as_factor(ratio)} for all variables in {steps_in_words(fits)}, the ratio "
        f"of the numbers of batches; after dividing by it the remaining error is {max(fit.after for fit in fits):.1f}x "
        "the noise floor",
        then=lambda: case.explain_fits(fits, lambda point: abs(point.factor / ratio - 1) < 10 * ROUND),
    )


def _decayed(case: Case, fits: list[Fit], count: str) -> Sign | None:
    """Check whether a term that does not depend on examples is added once for each batch."""
    if not fits or any(not fit.decay or fit.shares or abs(fit.scale - 1) > ROUND for fit in fits):
        return None
    names = names_in_words(list(dict.fromkeys(name for fit in fits for name in fit.decay)))
    return Sign(
        f"A regularization or decay is added once for each batch of an update: {count}.",
        f"In {steps_in_words(fits)} the gradient of {names} is that of one device plus a multiple of the weights; "
        f"without this multiple the remaining error is {max(fit.after for fit in fits):.1f}x the noise floor",
        then=lambda: case.explain_fits(fits),
    )


def _changed(case: Case, optimizer: str, ratio: float, count: str) -> Sign | None:
    """Check whether the loss of a step agrees and its gradients do not."""
    step = case.base.first_step("gradient", "weight")
    if (optimizer, step) not in case.explain_gradients().unexplained and not any(
        (fit.optimizer, fit.step) == (optimizer, step) for fit in case.explain_gradients().weighted
    ):
        return None
    assert step is not None
    pairs = case.base.runs.pairs(optimizer)
    here, there = (objective(of_run) for of_run in pairs[step])
    if here is None or not there or min(abs(here / there - 1), abs(here / there / ratio - 1)) > ROUND:
        return None
    again = case.switch("no-clipping") if case.facts.clips else None
    evidence = f"In step {step} the loss agrees, but the gradients that enter the optimizer do not"
    then = partial(case.cut, step, "each batch of an update is changed on its own")
    if again is not None and again.is_equivalent:
        then = partial(case.rebase, again, "no-clipping")
        evidence += "; with clipping switched off in both runs everything agrees"
    summary = f"Each batch of an update is changed on its own (clipped, normalized) before the batches are summed: {count}."
    return Sign(summary, evidence, then=then)


def of_sparse_gradients(case: Case) -> Sign | None:
    """Look for gradients of tables: their values alone are added up, or the optimizer takes a row once for each replica."""
    return _of_values(case) or _of_the_optimizer(case)


def _of_values(case: Case) -> Sign | None:
    """Check whether the program adds up the values of a sparse gradient, whose rows on each replica are others."""
    out = [
        p for p in case.base.exceeding if p.measure.key.kind == "gradient" and p.measure.key.tensor in case.facts.values_added
    ]
    first = min(out, key=lambda point: point.step, default=None)
    if first is None or first.step != case.base.first_step("gradient"):
        return None
    tensor, step = first.measure.key.tensor, first.step
    return Sign(
        f"The values of a sparse gradient ({tensor}) are added up over the replicas, and the rows they belong to are not.",
        f"The step gives the values of a tf.IndexedSlices to all_reduce; in step {step} the gradient of {tensor} differs "
        f"by {first.ratio:.0f}x the noise floor",
        _OF_VALUES,
        blame=[operations("sum", "all_reduce"), between("given")],
        then=lambda: case.explain(lambda point: point.measure.key.tensor == tensor or point.step > step),
    )


def _of_the_optimizer(case: Case) -> Sign | None:
    """Check whether gradients agree, and only weights with sparse gradients differ, in a way that equal rows can make."""
    apart, before = case.base.first_step("weight"), case.base.first_step("gradient")
    if apart is None or (before is not None and before <= apart):
        return None
    out = [p for p in case.base.exceeding if p.step == apart and p.measure.key.kind == "weight"]
    optimizer = out[0].measure.key.optimizer
    steps = complete(case.base.runs.topology, optimizer)
    if apart >= len(steps):
        return None
    sparse = {name for local in steps[apart].values() for name, array in local.gradients.items() if array.rows is not None}
    tensors = sorted({point.measure.key.tensor for point in out})
    factor = factor_of(case, out[0])
    if not set(tensors) <= sparse or (factor is not None and abs(factor - 1) > ROUND):
        return None
    if _is_in_proportion(case, optimizer, apart, tensors):  # so it is the same whether equal rows are summed before or not
        return None
    if not all(_differs_where_replicas_meet(case, apart, tensor, optimizer) for tensor in tensors):
        return None
    agreeing = {p.measure.key.tensor for p in case.base.points if p.step == apart and p.measure.key.kind == "weight"}
    worst = max(out, key=lambda point: point.ratio)
    return Sign(
        f"The optimizer updates {tensors[0]} from a sparse gradient that has a row once for each replica that looked it up.",
        f"in step {apart} all gradients agree; of {len(agreeing)} weights only {len(tensors)} with a sparse "
        f"gradient (tf.IndexedSlices) differ: {', '.join(tensors[:3])}, by {worst.ratio:.0f}x the noise floor",
        then=lambda: case.explain_update(apart),
    )


def _is_in_proportion(case: Case, optimizer: str, step: int, tensors: Sequence[str]) -> bool:
    """Return whether one device's update of some variables is their gradients times one number, as far as the runs differ."""
    reference, own = case.base.runs.reference, complete(case.base.runs.topology, optimizer)[step]
    of_run = complete(reference, optimizer)[step]
    changes, apart = [np.zeros((2, 0))], 0.0
    for tensor in tensors:
        stored = [weights_before(reference, optimizer, step, tensor), weight_of(of_run, tensor), weight_of(own, tensor)]
        kept = [array for array in stored if array is not None]
        if len(kept) < len(stored):
            return False
        before, after, other, *gradients = aligned([*kept, *gradients_of(of_run, tensor).values()])
        changes.append(np.stack([after - before, np.sum(gradients, axis=0)]))
        apart += norm(other - after) ** 2
    update, gradient = np.concatenate(changes, axis=1)
    size = float(np.dot(gradient, gradient))
    left = norm(update - float(np.dot(update, gradient)) / size * gradient) if size else 0.0
    return left < _PART * float(np.sqrt(apart))


_PART = 0.1
"""An update is in proportion if its rest is at most this part of the difference between the runs: then that is rounding."""


def _differs_where_replicas_meet(case: Case, apart: int, tensor: str, optimizer: str) -> bool:
    """Return whether a table differs only in rows that several replicas have looked up, or not all of it was recorded."""
    runs = case.base.runs
    step = complete(runs.topology, optimizer)[apart]
    tables = [weight_of(of_run, tensor) for of_run in (step, complete(runs.reference, optimizer)[apart])]
    values = [table.read() for table in tables if table is not None and table.is_complete]
    gradients = [local.gradients[tensor] for local in step.values() if tensor in local.gradients]
    if len(values) < len(tables) or any(gradient.rows is None for gradient in gradients):
        return True
    looked_up = np.concatenate([np.unique(gradient.read_rows()[0]) for gradient in gradients])
    numbers, times = np.unique(looked_up, return_counts=True)
    sizes = np.abs(values[0] - values[1]).reshape(len(values[0]), -1).max(axis=1)
    return set(np.flatnonzero(sizes > ROUND * sizes.max())) <= set(numbers[times > 1])


_OF_VALUES = "If the program adds up the values itself"
