"""Measure one tensor against the reference: the error, and the spread of the noise runs.

Also measured are the numbers that a program reports (losses, metrics, logs), and what it makes of its weights after its last
step: averages, or the best ones. A program that applies several batches together (accumulation) may report a loss for each of
them. Where it makes fewer batches of the same rows on several devices, their reports are taken together, step by step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from emulate.told import told_apart
from emulate.trace import SO_FAR, Facts, Report, Step, StoredArray, Trace
from emulate.verify.compared_runs import Runs, as_many_steps, complete, unit_of
from emulate.verify.gradients import Floats, aligned, eps_of, is_numeric, largest, norm, objective, weight_of
from emulate.verify.noise import Key


@dataclass(frozen=True)
class Measure:
    """Hold one tensor in one step.

    Attributes:
        error: Largest absolute difference from the reference.
        relative: L2 norm of the difference over the L2 norm of the reference.
        spread: Largest absolute difference of the noise runs from the reference; NaN without one that has it.
        confirmed: The same of the extra noise runs with larger perturbation.
        scale: Largest absolute element of the reference and of the local gradients.
        non_finite: One has a NaN or an infinity where the other one has a number, and no noise run says that this is chance.
        both_non_finite: Both have one in the same place.
        compares: Both have a number somewhere in the same place.
        is_of_chance: It says nothing: the noise runs, which have the rows of a batch in another order, are about as far away as
            any other numbers would be.
        at: The training step it belongs to: `step` itself but for numbers that are reported once in many steps.
    """

    key: Key
    step: int
    error: float
    relative: float
    spread: float
    confirmed: float
    scale: float
    eps: float
    value: float | None = None
    reference_value: float | None = None
    replica: int | None = None
    host: int | None = None
    non_finite: bool = False
    both_non_finite: bool = False
    compares: bool = True
    is_of_chance: bool = False
    at: int | None = None

    @property
    def in_print(self) -> tuple[str, str]:
        """Return `value` and `reference_value` for a reader, with digits that tell them apart."""
        return told_apart(self.value, self.reference_value)


def measure(
    key: Key,
    step: int,
    arrays: Sequence[Floats],
    num_noise: int,
    *,
    eps: float,
    scale: float = 0.0,
    host: int | None = None,
) -> Measure:
    """Compare one tensor. All arrays have the same elements: ours, theirs, of so many noise runs, of those that confirm."""
    ours, theirs, *beside = arrays
    finite = np.isfinite(ours) & np.isfinite(theirs)
    distance = np.where(finite, np.abs(np.where(finite, ours, 0.0) - np.where(finite, theirs, 0.0)), 0.0)
    lost = np.isfinite(ours) != np.isfinite(theirs)
    for array in beside:  # what overflows by chance
        lost &= np.isfinite(array) == np.isfinite(theirs) if array.shape == theirs.shape else True
    at = int(np.argmax(lost)) if lost.any() else (int(np.argmax(distance)) if distance.size else -1)
    size = norm(np.where(np.isfinite(theirs), theirs, 0.0))
    return Measure(
        key=key,
        step=step,
        error=float(distance.max()) if distance.size else 0.0,
        relative=norm(distance) / size if size else (float("inf") if distance.any() else 0.0),
        spread=max((_distance(array, theirs) for array in beside[:num_noise]), default=math.nan),
        confirmed=max((_distance(array, theirs) for array in beside[num_noise:]), default=0.0),
        scale=max(scale, largest(theirs)),
        eps=eps,
        value=float(ours[at]) if at >= 0 else None,
        reference_value=float(theirs[at]) if at >= 0 else None,
        host=host,
        non_finite=bool(lost.any()),
        both_non_finite=bool((~np.isfinite(ours) & ~np.isfinite(theirs)).any()),
        compares=bool(finite.any()) or not finite.size,
    )


def _distance(one: Floats, other: Floats) -> float:
    """Return the largest difference of finite elements: a loss scale may make both gradients infinite."""
    if one.shape != other.shape:
        return 0.0
    with np.errstate(invalid="ignore"):
        return largest(one - other)


def coarsest_unit(runs: Runs, step: Mapping[int, Step]) -> float:
    """Return the coarsest unit of a step's gradients."""
    return max((unit_of(a, runs.computed) for local in step.values() for a in local.gradients.values()), default=eps_of("<f4"))


def same_shape(arrays: list[StoredArray]) -> bool:
    """Return whether arrays can be compared element by element."""
    return len({array.shape for array in arrays}) == 1


_ALIKE = 1e-3
"""Tolerance of an evaluation of the same rows in different batches, after steps that differ by rounding."""
Place = tuple[int, str, str, int, int]
"""(host, kind, name, step, how manieth of its name in this step)"""


_TOGETHER: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": lambda values: float(np.sum(values)),
    "mean": lambda values: float(np.mean(values)),
    "last": lambda values: values[-1],
}


def reported(reports: Sequence[Report], by_batch: Mapping[str, tuple[int, str]]) -> dict[Place, Report]:
    """Return what the program reported, each with its place; a replica's own numbers are left out.

    Args:
        reports: As recorded.
        by_batch: Names of which so many are taken together, and as what: their `sum`, their `mean`, or the `last` of them.

    Returns:
        The reports by place.
    """
    by_place: dict[Place, Report] = {}
    for report in _together([report for report in reports if report.replica is None], by_batch):
        count = 0
        while (place := (report.host, report.kind, report.name, report.step, count)) in by_place:
            count += 1
        by_place[place] = report
    return by_place


def _together(reports: Sequence[Report], by_batch: Mapping[str, tuple[int, str]]) -> list[Report]:
    joined = [report for report in reports if report.name not in by_batch]
    for name, (size, how) in by_batch.items():
        for host in sorted({report.host for report in reports}):
            one_by_one = [report for report in reports if (report.host, report.name) == (host, name)]
            for at in range(0, len(one_by_one) - size + 1, size):
                values = [report.value for report in one_by_one[at : at + size]]
                made = one_by_one[at + size - 1].made
                joined.append(replace(one_by_one[at], step=at // size, value=_TOGETHER[how](values), made=made))
    return joined


def reported_by_batch(runs: Runs) -> dict[str, tuple[tuple[int, int], str]]:
    """Return what is reported for each batch, if the runs' steps have different numbers of batches.

    Args:
        runs: The runs that are compared.

    Returns:
        By name how many reports belong to one step, in the topology and in the reference, and as what they are taken
        together: the batches' losses add up to the step's or are each like it, as what the gradients are taken of does.
    """
    by_name: dict[str, tuple[tuple[int, int], str]] = {}
    for optimizer in runs.optimizers:
        ours, theirs = runs.batches(optimizer)
        if ours == theirs:
            continue
        steps = [len(runs.topology.steps(optimizer)), len(runs.reference.steps(optimizer))]
        counts = [Counter(report.name for report in t.reports if report.host == 0) for t in (runs.topology, runs.reference)]
        for name in counts[0]:
            pairs = zip(counts, steps, (ours, theirs), strict=True)
            if all(abs(count[name] - num_steps * size) < size for count, num_steps, size in pairs):
                # A metric of Keras counts all batches so far: its last result is that of the step.
                how = "last" if name.startswith("metric/") else _how(runs, optimizer, ours / theirs)
                by_name[name] = ((ours, theirs), how)
    return by_name


def of_other_batches(runs: Runs) -> list[str]:
    """Return names of which the runs report different numbers between the same steps, equally many on the whole.

    An evaluation whose batches grow with the replicas does so; where it sees other rows its numbers differ on the whole too.

    Args:
        runs: The runs that are compared, that have made as many steps.

    Returns:
        The names.
    """
    ours, theirs = (_between_steps(trace) for trace in (runs.topology, runs.reference))
    names = []
    for name in (ours.keys() & theirs.keys()) - reported_by_batch(runs).keys():
        both = [(ours[name][at], theirs[name][at]) for at in ours[name].keys() & theirs[name].keys()]
        if any(len(values) != len(other) for values, other in both) and any(
            all(np.isclose(whole(values), whole(other), rtol=_ALIKE, atol=0.0) for values, other in both)
            for whole in (np.mean, np.sum)
        ):
            names.append(name)
    return sorted(names)


def _between_steps(trace: Trace) -> dict[str, dict[int, list[float]]]:
    """Return the first host's reports by name and by steps before them, without the last, which may be partial."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for report in trace.reports:
        if report.host == 0 and report.replica is None and report.made is not None:
            by_name.setdefault(report.name, {}).setdefault(report.made, []).append(report.value)
    for by_made in by_name.values():
        if len(by_made) > 1:
            del by_made[max(by_made)]
    return by_name


def _how(runs: Runs, optimizer: str, ratio: float) -> str:
    """Return `sum` or `mean`, as the objectives of the first step compare: its batches' sum is equal, or each batch's value."""
    first = [objective(step) for step in runs.pairs(optimizer)[0]]
    if first[0] is None or not first[1] or not first[0] / first[1] > 0:
        return "sum"
    factor = first[0] / first[1]
    return "sum" if abs(np.log(factor)) <= abs(np.log(factor / ratio)) else "mean"


def reports(runs: Runs) -> Iterator[Measure]:
    """Yield the measures of all reports that both runs made."""
    by_batch = reported_by_batch(runs)
    ours = reported(runs.topology.reports, {name: (counts[0], how) for name, (counts, how) in by_batch.items()})
    beside_it = {name: (counts[1], how) for name, (counts, how) in by_batch.items()}
    theirs = reported(runs.reference.reports, beside_it)
    noise = (*runs.noise, *(trace for trace in runs.reported if not trace.follows))
    others = [reported(trace.reports, beside_it) for trace in (*noise, *runs.confirmation)]
    # Rounding alone decides a bias before BatchNormalization: another one in each noise run, the same at the same weights.
    of_the_same = [reported(trace.reports, beside_it) for trace in runs.reported if trace.follows and len(runs.reported) == 1]
    precision = max(
        (coarsest_unit(runs, theirs_) for name in runs.optimizers for _, theirs_ in runs.pairs(name)[:1]), default=eps_of("<f4")
    )
    last = max((len(runs.pairs(name)) for name in runs.optimizers), default=1) - 1
    often = Counter((host, kind, name) for host, kind, name, _, _ in ours)
    unlike = {*of_other_steps(runs), *of_other_batches(runs), *of_own_statistics(runs)}
    for place, report in ours.items():
        there = (0, *place[1:])
        if there not in theirs or report.name in unlike:
            continue
        # A run without this report adds nothing to the floor, and the others stay what they are: noise or confirmation.
        is_made = any(there in values for values in others)
        beside = [np.array([values.get(there, theirs[there]).value]) for values in others] if is_made else []
        at = _step_of(report, often[place[:3]], last)
        values = next((values for values in of_the_same if at != report.step and there in values), theirs)
        measured = measure(
            Key(report.kind, "", report.name),
            report.step,
            [np.array([report.value]), np.array([values[there].value]), *beside],
            len(noise),
            eps=precision,
            host=place[0] if runs.topology.num_hosts > 1 else None,
        )
        yield replace(measured, at=at)


def _step_of(report: Report, often: int, last: int) -> int:
    """Return the step of a report, given the number of reports: one for each step, several for each, or fewer."""
    if often < last:
        return last if report.made is None else min(max(report.made - 1, 0), last)
    times = -(-often // (last + 1))
    each = times if times * (last + 1) - often <= times else 1  # those of the step in which runs are held may be missing
    return min(report.step // max(each, 1), last)


def of_own_statistics(runs: Runs) -> list[str]:
    """Return the names of what evaluations report where each replica has its own moving statistics.

    Keras 3 does not aggregate those of BatchNormalization. One device that normalizes by share has those of the first.
    """
    if not Facts.of(runs.reference).by_share:
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    counts = Counter(report.name for report in runs.topology.reports if report.host == 0)
    of_keras = ("evaluate/", "epoch/val_")
    of_training = ("batch/", "epoch/", SO_FAR)  # means over the steps' own numbers
    # A loop of the program's own has no such names: what it reports less often than it steps is of no step.
    seldom = [name for name, count in counts.items() if count < fewest - 1 and not name.startswith(of_training)]
    return [name for name in counts if name.startswith(of_keras) or name in seldom]


def of_other_steps(runs: Runs) -> list[str]:
    """Return the names of reports made once in many steps, if the runs have made different numbers of them."""
    if as_many_steps(runs):
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    by_step = max(fewest - 1, 2)
    counts = [Counter(report.name for report in trace.reports if report.host == 0) for trace in (runs.topology, runs.reference)]
    return [name for name, count in counts[0].items() if counts[1][name] > 0 and count < by_step]


def changed_in_the_end(trace: Trace) -> list[str]:
    """Return trained variables whose values the program replaced after all steps."""
    return list(dict.fromkeys([*(name for _, event in trace.of("left") for name in event["changed"]), *_unseen_updates(trace)]))


def _unseen_updates(trace: Trace) -> list[str]:
    """Return variables that are updated outside of the steps and whose last update nobody saw."""
    steps = (local for name in trace.optimizers for step in complete(trace, name) for local in step.values())
    return list(dict.fromkeys(name for step in steps for name in step.outside if name not in step.weights))


def ends_of_hosts(trace: Trace) -> dict[str, dict[int, str | None]]:
    """Return, with several hosts, each host's digest of its final value of them; None without one."""
    if trace.num_hosts < 2:
        return {}
    changed = {(host, event["replica"]): event["changed"] for host, event in trace.of("left")}
    ends: dict[str, dict[int, str | None]] = {name: {} for name in changed_in_the_end(trace)}
    for place, variables in trace.variables("left").items():
        for name, by_host in ends.items():
            by_host.setdefault(place[0], variables[name].digest if name in changed[place] and name in variables else None)
    return ends


def left_to_compare(runs: Runs) -> list[str]:
    """Return those that one of the runs has changed, if both ended after equally many steps."""
    if not all(any(True for _ in trace.of("left")) for trace in (runs.topology, runs.reference)) or not as_many_steps(runs):
        return []
    changed = dict.fromkeys([*changed_in_the_end(runs.reference), *changed_in_the_end(runs.topology)])
    unseen = {*_unseen_updates(runs.reference), *_unseen_updates(runs.topology)}
    return [name for name in changed if name not in unseen]


def final_weights(runs: Runs) -> Iterator[Measure]:
    """Yield the measures of what the program made of its weights after the last step: averages, or the best ones."""
    names = left_to_compare(runs)
    ended = [_ended_with(trace, names) for trace in (runs.topology, runs.reference, *runs.others)] if names else []
    step = max((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    for name in names:
        ours, theirs, *beside = [weights.get(name) for weights in ended]
        if ours is None or theirs is None or not is_numeric(theirs) or not same_shape([ours, theirs]):
            continue
        arrays = aligned([ours, theirs, *(theirs if array is None else array for array in beside)])
        yield measure(Key("final-weight", "", name), step, arrays, len(runs.noise), eps=eps_of(theirs.dtype))


def _ended_with(trace: Trace, names: Collection[str]) -> dict[str, StoredArray]:
    """Return the final values of these variables on the first replica of the first host."""
    steps = [all_steps[-1] for name in trace.optimizers if (all_steps := complete(trace, name))]
    trained = {name: array for step in steps for name in names if (array := weight_of(step, name)) is not None}
    first = next(iter(trace.variables("left").values()), {})
    changed = next((event["changed"] for _, event in trace.of("left")), ())
    return trained | {n: v.array for n, v in first.items() if n in changed and n in names and v.array is not None}
