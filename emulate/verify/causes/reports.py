"""Detect wrong reports of a correct training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

from emulate.told import told
from emulate.trace import SO_FAR, Report
from emulate.verify.arithmetic import ROUND
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, as_factor, names_in_words
from emulate.verify.causes.updates import factor_of, first_of_update
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import objective
from emulate.verify.lines import operations, returned, updates_of
from emulate.verify.noise import Key


def _of_kinds(*kinds: str) -> Callable[[Point], bool]:
    return lambda point: point.measure.key.kind in kinds


def _wrong(case: Case, is_of_kind: Callable[[Point], bool]) -> list[Point]:
    """Return reports of one name and kind that differ in steps with equal gradients and weights."""
    # Where one factor explains the gradients of a step, its loss stays comparable.
    fits = case.explain_gradients().scaled
    scaled = {("gradient", fit.optimizer, fit.step) for fit in fits if not fit.shares and not fit.decay}
    trained = {(p.measure.key.kind, p.measure.key.optimizer, p.step) for p in case.base.exceeding} - scaled
    clean = min((step for kind, _, step in trained if kind in ("gradient", "weight")), default=None)
    points = [p for p in case.left() if is_of_kind(p) and (clean is None or p.step < clean)]
    return [p for p in points if p.measure.key == points[0].measure.key]


def _search_loss(case: Case) -> Sign | None:
    others = _beside_the_loss(case)
    wrong = _wrong(case, lambda point: point.measure.key.kind == "loss" and point.measure.key.tensor not in others)
    if not wrong:
        return _of_another_training(case)
    name = wrong[0].measure.key.tensor
    m = wrong[0].measure
    evidence = (
        f"{name} is {m.in_print[0]} in {_place(wrong[0])}, {m.in_print[1]} on one device (factor "
        f"{as_factor(wrong[0].factor)}, {_factors(wrong)}); the gradients and weights of these steps agree"
    )
    reports = _reports(case, wrong)
    what = _what(case, wrong, reports)
    progress = _progress(case, wrong) if what == _ANY else None
    if progress is not None:
        then = partial(case.explain_aside, _of_kinds("loss"))
        return Sign(f"The loss {name} {progress[0]}", evidence, progress[1], advice=True, then=then)
    is_of_keras = name.startswith(("batch/", "epoch"))
    is_scaled = name.startswith("metric/") and _by_replicas(case, [p.factor for p in wrong]) is not None
    fix = _OF_MEANS if what == _OF_REPLICAS else _OF_A_METRIC if is_scaled else None
    fix = _of_logs(case) if is_of_keras else fix
    if fix == _OF_FIT and _is_updated_by_the_program(case, name) and _by_replicas(case, [p.factor for p in wrong]) is not None:
        fix = _OF_A_METRIC
    alike = _alike(case, wrong)
    evidence += f"; {names_in_words(alike)} {'is' if len(alike) == 1 else 'are'} off by the same factor" if alike else ""
    by_host, follow = _set_by_the_host(case, wrong[0])
    evidence += _reduced_in(reports) + by_host
    blame = [updates_of(*(one.rpartition("/")[2] for one in (name, *alike)))] if is_of_keras or is_scaled else []
    blame += [returned("reported")] * (is_of_keras and case.facts.own_train_step)
    is_of_step = wrong[0].step == wrong[0].measure.step  # an epoch or an evaluation has that of many examples
    right = "the loss that is minimized" if is_of_step else "the loss of one device on the same examples"
    summary = f"The reported loss ({name}) is not {right}: {what}."
    return Sign(summary, evidence, fix, blame=blame, then=lambda: follow(_of_kinds("loss")))


def _alike(case: Case, wrong: Sequence[Point]) -> list[str]:
    """Return the names of other losses that are off by the same factor in the same steps."""
    steps, factor = {point.step for point in wrong}, wrong[0].factor
    whole, last = _by_replicas(case, [factor]), wrong[0].measure.key.tensor.rpartition("/")[2]
    losses = [point for point in case.left() if point.measure.key.kind == "loss" and point.step in steps]
    names = {point.measure.key.tensor for point in losses if whole and _by_replicas(case, [point.factor]) == whole}
    by_last = {name.rpartition("/")[2]: name for name in sorted(names, reverse=True)}  # of each step rather than of an epoch
    return sorted(name for its, name in by_last.items() if its != last)


def _of_another_training(case: Case) -> Sign | None:
    """Check whether a run that trains another loss than one device does not report that loss either."""
    for name, points in _taken(case).items():
        together = _factors_of_trained(case, [(point.step, point.measure.value or 0.0) for point in points], of=0)
        alone = _factors_of_trained(case, [(point.step, point.measure.reference_value or 0.0) for point in points])
        is_loss = any(abs(factor - 1) < ROUND for factor in alone)
        times = together[0] if is_loss and together else 1.0
        what = _by_replicas(case, [times])
        pairs = [(point.measure.value or 0.0, point.measure.reference_value or 0.0) for point in points if point.exceeds]
        are_nearer = all(abs(ours / times - theirs) < abs(ours - theirs) for ours, theirs in pairs)
        # What is trained with a wrong factor may be reported with the right one.
        if what is None or len(pairs) < len(points) or not are_nearer:
            continue
        steps, places = len({point.step for point in points}), _reduced_in(_reports(case, points))
        return Sign(
            f"The reported loss ({name}) is not the loss that is minimized: {what}.",
            f"{name} is {as_factor(times)} times the sum of the replicas' losses, of which the gradients are taken, in "
            f"{steps} steps; on one device it is that loss{places}",
            then=partial(case.explain, _of_kinds("loss", "metric")),
        )
    return None


def _taken(case: Case) -> dict[str, list[Point]]:
    """Return the numbers that the program reduces in each step, by name."""
    taken: dict[str, list[Point]] = {}
    for point in case.base.points:
        if point.measure.key.kind == "loss" and _TAKEN.search(point.measure.key.tensor):
            taken.setdefault(point.measure.key.tensor, []).append(point)
    return taken


def _beside_the_loss(case: Case) -> set[str]:
    """Return the names of numbers that the program reduces in each step beside its loss: an accuracy, for example.

    What is always as many times what is trained is a loss too.
    """
    taken = _taken(case).items()
    values = {name: [(point.step, point.measure.reference_value or 0.0) for point in points] for name, points in taken}
    factors = {name: _factors_of_trained(case, series) for name, series in values.items()}
    trained = [name for name, its in factors.items() if any(abs(factor - 1) < ROUND for factor in its)]
    return {
        name for name, its in factors.items() if not its and any(len(values[name]) == len(values[other]) for other in trained)
    }


_TAKEN = re.compile(r"/(reduce|local result)( \d+)?$")


def _factors_of_trained(case: Case, values: Sequence[tuple[int, float]], of: int = 1) -> list[float]:
    """Return, for each optimizer, the factor between the numbers of all steps and its objective, if there is one.

    `of` is 0 for the run's own numbers and objectives, 1 for those of one device.
    """
    factors = []
    for name in case.base.runs.optimizers:
        objectives = [objective(pair[of]) for pair in case.base.runs.pairs(name)]
        ratios = [value / (objectives[step] or math.nan) for step, value in values if step < len(objectives)]
        if ratios and all(abs(ratio - ratios[0]) <= ROUND * abs(ratios[0]) for ratio in ratios):
            factors.append(ratios[0])
    return factors


def _reports(case: Case, wrong: Sequence[Point]) -> list[Report]:
    """Return these reports as the program made them."""
    places = {(p.measure.host or 0, p.measure.key.tensor, p.measure.step) for p in wrong}
    return [report for report in case.base.runs.topology.reports if (report.host, report.name, report.step) in places]


def _reduced_in(reports: Sequence[Report]) -> str:
    lines = list(dict.fromkeys(report.line for report in reports if report.line))
    return f"; reduced at {names_in_words(lines)}" if lines else ""


def _of_logs(case: Case) -> str:
    """Return the text about Keras's logs in `fit`: of the program's own `train_step`, or of Keras's."""
    if _has_central_storage(case) or case.facts.mirrored_metrics:
        return _OF_CENTRAL_STORAGE if _has_central_storage(case) else _OF_OLD_KERAS
    are_own = [event["own_train_step"] for _, event in case.untouched.of("program") if "own_train_step" in event]
    return _OF_A_TRAIN_STEP if any(are_own) or not are_own else _OF_FIT


def _is_updated_by_the_program(case: Case, name: str) -> bool:
    """Return whether the program itself gives a metric what Keras then logs."""
    return any(not line.get("called") for line in updates_of(name.rpartition("/")[2]).find(case.lines))


def _has_central_storage(case: Case) -> bool:
    return any("CentralStorage" in str(event["name"]) for _, event in case.untouched.of("strategy"))


def _place(point: Point) -> str:
    return f"step {point.step}" if point.step == point.measure.step else f"report {point.measure.step}, after step {point.step}"


_PROGRESS = "Only the progress within an epoch differs"
_OF_MEANS = "If it is a mean of the replicas"
_OF_A_METRIC = "If a metric takes the loss"
_OF_A_TRAIN_STEP = "In your own train_step"
_OF_FIT = "With Keras's own train_step"
_OF_CENTRAL_STORAGE = "Under CentralStorageStrategy"
_OF_BATCHES = "If the metric is one number for each batch"
_OF_OLD_KERAS = "With Keras up to 3.9"


_ANY = "the factor differs each time"
_OF_REPLICAS = "it is the mean of the replicas' numbers, even if they have different numbers of examples"


def _what(case: Case, wrong: Sequence[Point], reports: Sequence[Report]) -> str:
    by_replicas = _by_replicas(case, [p.factor for p in wrong])
    if by_replicas is not None:
        return by_replicas
    replica = _one_replica(case, wrong)
    if replica is not None:
        return f"it is the loss of replica {replica} only"
    return _OF_REPLICAS if any(report.how == "mean" for report in reports) else _ANY


def _by_replicas(case: Case, factors: Sequence[float]) -> str | None:
    """Return what makes numbers too large or too small by the number of replicas; None where they are not."""
    n = case.num_replicas
    if all(abs(factor * n - 1) < 10 * ROUND for factor in factors):
        return f"it is divided by the number of replicas ({n}) once too often, so it is {n}x too small"
    if all(abs(factor / n - 1) < 10 * ROUND for factor in factors):
        return f"it is the sum over the {n} replicas instead of their mean"
    return None


def _one_replica(case: Case, wrong: Sequence[Point]) -> int | None:
    """Return the replica whose local objective (or its mean) was reported."""
    for optimizer in case.base.runs.optimizers:
        steps = complete(case.base.runs.topology, optimizer)
        for replica in steps[0] if steps else ():
            pairs = [(steps[p.step][replica].objective, p.measure.value) for p in wrong if p.step < len(steps)]
            for times in (1.0, float(case.num_replicas)):
                if pairs and all(a is not None and b is not None and abs(a * times - b) <= ROUND * abs(b) for a, b in pairs):
                    return replica
    return None


def _factors(wrong: Sequence[Point]) -> str:
    factors = [p.factor for p in wrong]
    return f"{as_factor(min(factors))} to {as_factor(max(factors))} in {len(wrong)} reports" if len(wrong) > 1 else "one report"


def _search_metric(case: Case) -> Sign | None:
    wrong = _wrong(case, _of_kinds("metric"))
    if not wrong:
        return _search_number(case)
    m = wrong[0].measure
    progress = _progress(case, wrong)
    host, follow = _set_by_the_host(case, wrong[0]) if progress is None else ("", case.explain_aside)
    then = partial(follow, _of_kinds("metric"))
    evidence = (
        f"{m.key.tensor} is {m.in_print[0]} in report {m.step}, {m.in_print[1]} on one device "
        f"({_factors(wrong)}); the gradients, weights and losses of these steps agree{host}"
    )
    if progress is not None:
        return Sign(f"The metric {m.key.tensor} {progress[0]}", evidence, progress[1], advice=True, then=then)
    is_of_strategy = _has_central_storage(case) and m.key.tensor.startswith(("batch/", "epoch"))
    of_batches = _OF_BATCHES if case.facts.distributed else None  # which counts each example once
    fix = _OF_CENTRAL_STORAGE if is_of_strategy else _OF_OLD_KERAS if case.facts.mirrored_metrics else of_batches
    summary = f"The metric {m.key.tensor} does not cover the examples of all replicas."
    return Sign(summary, evidence, fix, then=then)


def _search_number(case: Case) -> Sign | None:
    """Check for a number that is reported beside the loss."""
    others = _beside_the_loss(case)
    wrong = _wrong(case, lambda point: point.measure.key.tensor in others)
    if not wrong:
        return None
    m = wrong[0].measure
    aside = partial(case.explain_aside, lambda point: point.measure.key == m.key)
    if all(_is_a_count(case, point) for point in wrong):
        return Sign(
            f"The reported number ({m.key.tensor}) counts replicas, or the examples of a replica.",
            f"{m.key.tensor} is {m.in_print[0]} in {_place(wrong[0])}, {m.in_print[1]} on one device",
            _OF_NUMBERS,
            advice=True,
            then=aside,
        )
    if not _repeats(case, m.key):
        return Sign(then=partial(aside, _NOT_REPEATED.format(m.key.tensor)))
    reports = _reports(case, wrong)
    host, follow = _set_by_the_host(case, wrong[0])
    what = _what(case, wrong, reports)
    what = _OF_ONE if what == _ANY and "local result" in m.key.tensor else what
    return Sign(
        f"The reported number ({m.key.tensor}) does not cover all replicas: {what}.",
        (
            f"{m.key.tensor} is {m.in_print[0]} in {_place(wrong[0])}, {m.in_print[1]} on one device (factor "
            f"{as_factor(wrong[0].factor)}, {_factors(wrong)}); the gradients and weights of these steps agree"
        )
        + _reduced_in(reports)
        + host,
        _OF_NUMBERS,
        then=lambda: follow(lambda point: point.measure.key.tensor in others),
    )


def _repeats(case: Case, key: Key) -> bool:
    """Return whether one device reports a number again: a time it does not."""
    again = case.repeat()
    if again is None:
        return True
    both = ([report.value for report in trace.reports if report.name == key.tensor] for trace in (case.plain, again))
    return all(math.isclose(one, other, rel_tol=ROUND) for one, other in zip(*both, strict=False))


_NOT_REPEATED = told("not-repeated")("{}: two equal runs on one device report other numbers, so it was not compared")


def _is_a_count(case: Case, point: Point) -> bool:
    """Return whether a number is that of replicas, or of the examples of one of them, where one device has its own."""
    ours, theirs = point.measure.value, point.measure.reference_value
    steps = [step for name in case.topology.optimizers for step in complete(case.topology, name)[point.step : point.step + 1]]
    rows = [len(local.rows) for step in steps for local in step.values() if local.rows is not None]
    return (ours, theirs) == (case.num_replicas, 1.0) or (bool(rows) and ours in rows and theirs == sum(rows))


def _set_by_the_host(case: Case, wrong: Point) -> tuple[str, Callable[[Callable[[Point], bool]], None]]:
    """Return what a wrong report does to updates whose learning rate the host sets from it, and how both are explained."""
    first = first_of_update(case)
    factor = None if first is None or first.step <= wrong.step else factor_of(case, first)
    if first is None or factor is None or abs(factor - 1) < ROUND:
        return "", case.explain

    def follow(reports: Callable[[Point], bool]) -> None:
        case.cut(first.step + 1, f"in step {first.step} the weights change {factor:.4g}x as much")
        case.explain_update(first.step)
        case.explain(reports)

    how = f"from step {first.step} on the weights change {factor:.4g}x as much as on one device, where gradients agree"
    return f"; {how}: the program sets its learning rate from such a number", follow


_OF_ONE = "it is the number of one replica (experimental_local_results)"
_OF_NUMBERS = "For a reported number"
_NO_EPOCH = "The epoch was not seen"


def _progress(case: Case, first: Sequence[Point]) -> tuple[str, str] | None:
    """Return what differs and the fix, if only Keras's logs within an epoch differ.

    None where the epoch's, or what it would be if it ended where the run was held, was seen to differ too; and where neither
    was seen, but that it is a number of times what it should be, or one replica's.
    """
    kind = first[0].measure.key.kind
    seen = {point.measure.key.tensor for point in case.base.points if point.measure.key.kind == kind}
    wrong = {point.measure.key.tensor for point in case.left() if point.measure.key.kind == kind}
    if not all(name.startswith("batch/") for name in wrong):
        return None
    if all(seen & {name.replace("batch", epoch, 1) for epoch in ("epoch", SO_FAR)} for name in wrong):
        return "is the mean of the replicas' numbers within an epoch; the value at the end of the epoch is right.", _PROGRESS
    if _what(case, first, ()) != _ANY:
        return None
    return "does not cover all replicas within an epoch; gpudist did not see the value at the end of an epoch.", _NO_EPOCH


LOSS_REPORT = Cause("loss-report", _search_loss, blame=(operations("reported", "made", "reduced", "update"),))

METRIC_AGGREGATION = Cause("metric-aggregation", _search_metric, blame=(operations("reported", "made", "reduced", "update"),))
