"""Detect what depends on the batch of one replica: its number of examples, what is computed across them, and their statistics.

A replica may have fewer examples than others, or none, so that numbers become NaN. A loss may depend on the other examples of
its batch. BatchNormalization uses the mean and variance of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emulate.recorder import CENTERED, SYNCHRONIZED
from emulate.told import told
from emulate.verify.arithmetic import Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import GENERAL, Cause, Sign, numbers, steps_in_words
from emulate.verify.causes.joined import explain_by_joins, lines_of, said_by_joins
from emulate.verify.causes.sequential_replay import rebase_on_replay
from emulate.verify.compare import Comparison, Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import gradients_of, weight_of
from emulate.verify.joins import Member
from emulate.verify.lines import made, operations
from emulate.verify.run_spec import BY_SHARE


def _search_uneven(case: Case) -> Sign | None:
    fits = case.explain_gradients().uneven
    if not fits:
        return None
    case.explain_fits(fits)
    first = fits[0]
    rows = _examples_of_replicas(case, first)
    if case.has("empty-shard") and all(0 in _examples_of_replicas(case, fit) for fit in fits):
        return None  # the same division, by none
    are_even_before = first.step > 0 and case.base.first_step("gradient") == first.step
    even = f"; the {first.step} steps before it, with equally many examples on each replica, agree"
    return Sign(
        f"Replicas with fewer examples weigh as much as the others: in step {first.step} the replicas have "
        f"{numbers(rows)} examples.",
        (
            f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with "
            f"each replica weighted by its share of the examples the remaining error is {max(fit.after for fit in fits):.1f}x "
            "the noise floor"
        )
        + (even if are_even_before else ""),
        _OF_FIT if case.facts.compiled else None,
    )


def _examples_of_replicas(case: Case, fit: Fit) -> list[int]:
    step = complete(case.base.runs.topology, fit.optimizer)[fit.step]
    return [len(local.rows or ()) for _, local in sorted(step.items())]


def _search_weighted(case: Case) -> Sign | None:
    uneven = case.ledger.uneven if case.ledger is not None and case.has("uneven-batch") else ()
    fits = [fit for fit in case.explain_gradients().weighted if fit.step not in uneven]  # where the rows have other weights
    if case.joins is not None:
        return _sign_of_normalizers(case, fits, case.joins.normalizers)
    if not fits or (case.has("clip-before-reduce") and not case.without("no-clipping")):
        return None
    first = fits[0]
    shares = numbers([f"{share:.3f}" for _, share in sorted(first.shares.items())])
    if not case.are_counts(first):
        if case.lines.rows_meet or _is_padded_otherwise(case, first.optimizer, first.step):
            return None  # examples meet before the loss: it is no function of the loss that each replica has
        case.explain_fits(fits)
        return Sign(
            (
                "Each replica's gradient has its own factor, and no count explains it: each replica computes a function "
                "of its own loss (a root, a logarithm, a ratio) instead of the loss of the whole batch."
            ),
            (
                f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with "
                f"the replicas weighted by {shares} the remaining error is {max(fit.after for fit in fits):.1f}x the noise "
                f"floor for all variables. Weights of a count would add up to {len(first.shares)}; these do not"
            ),
            [_OF_ALL, *[_COMPILED] * bool(case.facts.compiled), *[_OF_A_MEAN] * bool(case.facts.distributed)],
        )
    case.explain_fits(fits)
    return Sign(
        "Each replica divides its loss by its own count (tokens, mask, weights) instead of the count over all replicas.",
        f"{steps_in_words(fits)}: the sum of the replicas' gradients is up to {100 * first.before:.3g}% off (L2); with the "
        f"replicas weighted by {shares} the remaining error is {max(fit.after for fit in fits):.1f}x the noise "
        "floor for all variables; every replica has equally many examples",
        _fix_of_count(case),
    )


def _sign_of_normalizers(case: Case, fits: Sequence[Fit], normalizers: Sequence[Member]) -> Sign | None:
    if not normalizers or case.joins is None:
        return None
    kinds = {member.kind for member in normalizers}
    are_counts = bool(fits) and case.are_counts(fits[0])
    is_all = len(normalizers) + len(case.joins.constants) == len(case.joins.members)
    if are_counts and is_all:
        how = said_by_joins(case, normalizers)
        case.explain_fits(fits)
    else:
        how = explain_by_joins(case, normalizers)
    if are_counts:
        shares = numbers([f"{share:.3f}" for _, share in sorted(fits[0].shares.items())])
        how = f"{how}. The replicas' gradients need the weights {shares}"
    if kinds & {"maximum", "minimum"}:
        fix: Sequence[str] | None = [_OF_EXTREMES]
    else:
        fix = _fix_of_count(case) if are_counts else [_BEFORE_IT_IS_USED, *[_COMPILED] * bool(case.facts.compiled)]
    return Sign(
        "Each replica divides its loss by its own count (tokens, mask, weights) instead of the count over all replicas."
        if are_counts
        else "Each replica scales its loss by a number that it computes from its own examples, instead of from those of all "
        "replicas.",
        how,
        fix,
        blame=lines_of(normalizers),
    )


def _fix_of_count(case: Case) -> Sequence[str] | None:
    """Return the fixes for programs that cannot simply divide by the count over all replicas."""
    if case.facts.distributed or case.facts.train_steps:
        return [_OF_CORE]
    return [GENERAL, _COMPILED] if case.facts.compiled else None


_OF_ALL = "If the loss is a function of the whole batch"
_COMPILED = "With Keras compile"
_OF_FIT = "With Keras fit"
_OF_A_MEAN = "If the loss is a function of the whole batch, with gd.distributed"
_OF_CORE = "With gpudist_core"
_OF_EXTREMES = "If it is a largest or smallest value"
_BEFORE_IT_IS_USED = "If the count is changed before it is used"

UNEVEN_BATCH = Cause(
    "uneven-batch", _search_uneven, blame=(operations("loss", "mean", "scale", "ratio"), made("examples", "batch"))
)

LOCAL_NORMALIZATION = Cause("local-normalization", _search_weighted, blame=(operations("loss", "count", "mean", "ratio"),))


def _is_padded_otherwise(case: Case, optimizer: str, step: int) -> bool:
    """Return whether the examples of a step have other lengths than on one device: each host fills up its own batches."""
    steps = [of_all for trace in (case.plain, case.untouched) for of_all in complete(trace, optimizer)[step : step + 1]]
    lengths = [
        {(place, array.shape[1:]) for local in of_all.values() for place in local.row_inputs if (array := local.inputs[place])}
        for of_all in steps
    ]
    return any(shapes != lengths[0] for shapes in lengths)


_WITHOUT_EXAMPLES = told("code-without-examples")(
    "code that does not depend on the examples (a loss term without examples, a count): the sequential replay runs it "
    "once for each replica, as the replicas do"
)


def _search_negatives(case: Case) -> Sign | None:
    if case.joins is not None:
        return _sign_of_meetings(case, case.joins.meetings)
    first = case.base.first_step("gradient")
    if first is None or not _is_open(case, first):
        return None
    before = case.base.exceeding[0]
    agrees = rebase_on_replay(case, first)
    if agrees is None:
        return None
    m = before.measure
    case.unreachable.append(_WITHOUT_EXAMPLES)
    return Sign(
        _DEPENDENT,
        f"{m.key.tensor} ({m.key.kind}) differs from step {first} on, by {before.ratio:.0f}x the noise floor; {agrees}",
        _OF_PADDING if _is_padded_otherwise(case, m.key.optimizer, first) else None,
    )


def _sign_of_meetings(case: Case, meetings: Sequence[Member]) -> Sign | None:
    if not meetings:
        return None
    how = explain_by_joins(case, meetings)
    are_padded = _is_padded_otherwise(case, case.joins.optimizer, case.joins.step) if case.joins is not None else False
    # A product that sums over the examples is seldom meant.
    are_sums = all(member.kind in ("sum", "mean") and member.operation in ("Sum", "Mean") for member in meetings)
    return Sign(
        _DEPENDENT,
        how,
        _OF_PADDING if are_padded else _OF_SUMS if are_sums else None,
        blame=lines_of(meetings),
    )


def _is_open(case: Case, step: int) -> bool:
    """Return whether no model explains the gradients of a step, or weights for which there is no count."""
    weighted = () if case.has("local-normalization") else case.explain_gradients().weighted
    without_count = [fit.step for fit in weighted if not case.are_counts(fit)]
    return step in [*(k for _, k in case.explain_gradients().unexplained), *without_count]


_DEPENDENT = (
    "The loss of one example depends on the other examples of its batch. Each replica sees only its own examples, so the "
    "program trains a different model."
)
_OF_SUMS = "If sums over the batch make the loss"
_OF_PADDING = "If each host pads its own batches"

IN_BATCH_NEGATIVES = Cause(
    "in-batch-negatives",
    _search_negatives,
    blame=(operations("loss", "contracts", "mixes", "ratio", "mixes-data"), operations("loss", "moves")),
)


_ALIKE = {
    BY_SHARE: "on one device that normalizes each replica's examples by themselves",
    SYNCHRONIZED: "with all BatchNormalization synchronized in both runs",
    CENTERED: "with the mean taken off the inputs of BatchNormalization in both runs",
}


def _search_batchnorm(case: Case) -> Sign | None:
    if not case.facts.batchnorm or case.num_replicas < 2 or not case.base.exceeding:
        return None
    statistics = [p for p in case.base.exceeding if p.measure.key.tensor in case.facts.batchnorm]
    normalized = case.normalize_alike()
    if normalized is not None:
        switch, again = normalized
        first, gone = case.base.exceeding[0], again.is_equivalent_but_for_kinks
        case.rebase(again, switch)
        case.notes.append(told("normalized-alike")(f"gradients, weights and losses were compared {_ALIKE[switch]}"))
        how = _with_switch(first, again, _ALIKE[switch], gone)
        return _sign_of_statistics(case, statistics, how) if gone or statistics else None
    if not statistics:
        return None
    case.cut(min(p.step for p in statistics), "BatchNormalization affects them, and gpudist could not synchronize it")
    return _sign_of_statistics(case, statistics, "")


def _with_switch(first: Point, again: Comparison, alike: str, gone: bool) -> str:
    m = first.measure
    before = f"{m.key.tensor} ({m.key.kind}) differs first, in step {first.step}, by {first.ratio:.0f}x the noise floor"
    if gone:
        return f"{before}; {alike} everything agrees"
    left = again.exceeding[0]
    return f"{before}; {alike} {left.measure.key.tensor} still differs from step {left.step} on"


def _sign_of_statistics(case: Case, statistics: list[Point], switched: str) -> Sign:
    numbers = [switched]
    if statistics:
        m = statistics[0].measure
        numbers.insert(0, f"{m.key.tensor} differs from step {m.step} on ({m.in_print[0]}, {m.in_print[1]} on one device)")
    return Sign(
        "BatchNormalization uses the mean and variance of each replica's own examples, not of the whole batch.",
        "; ".join(part for part in numbers if part),
        _OF_MASKS if case.facts.masked else None,
    )


_OF_MASKS = "If the input of the layer has a mask"
_MADE = made("loss", "BatchNormalization")
BATCHNORM = Cause("batchnorm-local-statistics", _search_batchnorm, by_design=True, blame=(_MADE,))


def _search_cancelled(case: Case) -> Sign | None:
    """Check whether the rounding of synchronized statistics makes the difference: in each step, at the weights of this run."""
    if not case.base.exceeding or case.facts.batchnorm or not _cancels(case) or not _MADE.find(case.lines):
        return None
    first, again = case.base.exceeding[0], case.switch(CENTERED)
    if again is None or not again.is_equivalent_but_for_kinks:
        return None
    case.rebase(again, CENTERED)
    return Sign(f"{_CANCELLED}.", _with_switch(first, again, _ALIKE[CENTERED], True), _CANCELLED)


def _cancels(case: Case) -> bool:
    """Return whether the mean of a layer's input is so large that E(x^2) - E(x)^2 keeps few digits."""
    for step in (step for name in case.topology.optimizers for step in complete(case.topology, name)[-1:]):
        for name in next(iter(step.values())).weights:
            mean, variance = (weight_of(step, name.replace("moving_mean", kind)) for kind in ("moving_mean", "moving_variance"))
            if name.endswith("moving_mean") and mean is not None and variance is not None:
                ratio = mean.read() ** 2 / np.maximum(np.abs(variance.read()), np.finfo(np.float32).tiny)
                if np.finfo(np.float32).eps * float(np.max(ratio)) > _FEW_DIGITS:
                    return True
    return False


_FEW_DIGITS = 1e-4
"""From this relative rounding error of a variance on, four of its seven digits are left."""
_CANCELLED = "Keras computes the variance of synchronized BatchNormalization as E(x^2) - E(x)^2, which cancels for a large mean"
BATCHNORM_CANCELLED = Cause("framework-limit", _search_cancelled, blame=(_MADE,))


def _search_empty(case: Case) -> Sign | None:
    lost = _first_lost(case)
    if lost is None:
        return None
    without = [replica for replica, count in enumerate(lost.rows or ()) if count == 0]
    where, fix = f"step {lost.point.step}", None
    if not without and lost.point.measure.key.kind in _REPORTED and not lost.whose:  # and no gradient of that step
        runs = case.base.runs.topology.of("evaluation")
        without = sorted({int(event["replica"]) for _, event in runs if not event["rows"]})
        where, fix = "an evaluation", _OF_EVALUATION
    if not without or (lost.whose and not set(without) & set(lost.whose)):
        return None
    lost.cut(case)
    who = f"replica {without[0]} has" if len(without) == 1 else f"replicas {numbers(without)} have"
    return Sign(f"In {where} {who} no examples. Dividing by zero examples gives NaN: {lost.what}", lost.evidence, fix)


def _search_nan(case: Case) -> Sign | None:
    lost = _first_lost(case)
    if lost is None:
        return None
    lost.cut(case)
    scales = any(about.get("loss_scale") for about in case.facts.optimizers.values())
    is_unseen = scales and lost.whose and 0 not in lost.whose
    why = " Keras's LossScaleOptimizer skips a step only if the first replica's gradients are not finite." if is_unseen else ""
    return Sign(lost.what[0].upper() + lost.what[1:] + why, lost.evidence, _OF_LOSS_SCALE if is_unseen else None)


@dataclass(frozen=True)
class _Lost:
    """Hold the first number that is not finite, the replicas with such a local gradient, and the replicas' batch sizes."""

    point: Point
    whose: list[int]
    rows: list[int] | None

    @property
    def what(self) -> str:
        m = self.point.measure
        return f"{m.key.kind} {m.key.tensor} becomes {m.value} in step {self.point.step}; on one device it stays finite."

    @property
    def evidence(self) -> str:
        m = self.point.measure
        text = f"{m.key.tensor}: {m.value}, {m.in_print[1]} on one device, in step {self.point.step}"
        if self.whose:
            text += f"; the gradient is not finite on replica {numbers(self.whose)}"
        if self.rows is not None and (self.whose or 0 in self.rows):
            text += f"; examples per replica in this step: {numbers(self.rows)}"
        return text

    def cut(self, case: Case) -> None:
        """Limit the comparison to what comes before; for a report alone, to everything except such reports."""
        if self.point.measure.key.kind in _REPORTED and not any(
            p.measure.non_finite for p in case.base.exceeding if p.measure.key.kind not in _REPORTED
        ):
            case.explain(lambda point: point.measure.non_finite)
        else:
            case.cut(self.point.step, "values are not finite")


def _first_lost(case: Case) -> _Lost | None:
    first = next((point for point in case.left() if point.measure.non_finite), None)
    return None if first is None else _Lost(first, *_whose_is_lost(case, first))


def _whose_is_lost(case: Case, point: Point) -> tuple[list[int], list[int] | None]:
    """Return the replicas whose local gradient is not finite, and the replicas' batch sizes."""
    names = [point.measure.key.optimizer] if point.measure.key.optimizer else case.base.runs.optimizers
    for optimizer in names:
        steps = complete(case.base.runs.topology, optimizer)
        if point.step >= len(steps):
            continue
        step = steps[point.step]
        whose = sorted({r for t in step[min(step)].gradients for r, a in gradients_of(step, t).items() if not a.is_finite})
        counts = [local.rows for _, local in sorted(step.items())]
        return whose, [len(rows) for rows in counts if rows is not None] if None not in counts else None
    return [], None


_REPORTED = ("loss", "metric")
_OF_LOSS_SCALE = "With a LossScaleOptimizer"
_OF_EVALUATION = "In an evaluation"

EMPTY_SHARD = Cause(
    "empty-shard", _search_empty, blame=(operations("loss", "mean", "ratio", "scale"), made("examples", "batch"))
)

NAN = Cause("nan", _search_nan, blame=(operations("loss", "count", "ratio", "mean", "scale"),))
