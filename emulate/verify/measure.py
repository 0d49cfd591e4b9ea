"""Measure every tensor of every step against the reference: the error, and the spread of the noise runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from emulate.probe.trace import Report, Step, StoredArray, Trace
from emulate.verify.aggregation import aggregation
from emulate.verify.arrays import Floats, aligned, eps_of, finite_difference, is_numeric, largest, norm
from emulate.verify.facts import Facts
from emulate.verify.gradients import StepOfAll, gradients_of, names_of, objective, state_of, total, weight_of
from emulate.verify.noise import REPORTED, Key
from emulate.verify.precision import Short, computed_in, unit_of, unit_of_all
from emulate.verify.reported import of_other_batches, reported, reported_by_batch

_OF_CHANCE = 0.1
"""Relative change of a variable if the rows of each batch are permuted. From this change on the variable stores rows (a queue).
Their order means nothing, so its values are compared sorted."""


@dataclass(frozen=True)
class Measure:
    """Hold one tensor in one step.

    Attributes:
        error: Largest absolute difference from the reference.
        relative: L2 norm of the difference over the L2 norm of the reference.
        spread: Largest absolute difference of the noise runs from the reference; NaN without one that has it.
        confirmed: The same of the extra noise runs with larger perturbation.
        scale: Largest absolute element of the reference and of the local gradients.
        non_finite: The topology has a NaN or an infinity where the reference has a number.
        both_non_finite: Both have one in the same place.
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
    is_of_chance: bool = False
    at: int | None = None


def measure(
    key: Key,
    step: int,
    ours: Floats,
    theirs: Floats,
    noise: Sequence[Floats],
    confirmation: Sequence[Floats] = (),
    *,
    eps: float,
    scale: float = 0.0,
    host: int | None = None,
) -> Measure:
    """Compare one tensor; all arrays have the same elements."""
    finite = np.isfinite(ours) & np.isfinite(theirs)
    distance = np.where(finite, np.abs(np.where(finite, ours, 0.0) - np.where(finite, theirs, 0.0)), 0.0)
    lost = ~np.isfinite(ours) & np.isfinite(theirs)
    at = int(np.argmax(lost)) if lost.any() else (int(np.argmax(distance)) if distance.size else -1)
    size = norm(np.where(np.isfinite(theirs), theirs, 0.0))
    return Measure(
        key=key,
        step=step,
        error=float(distance.max()) if distance.size else 0.0,
        relative=norm(distance) / size if size else (float("inf") if distance.any() else 0.0),
        spread=max((_distance(one, theirs) for one in noise), default=math.nan),
        confirmed=max((_distance(one, theirs) for one in confirmation), default=0.0),
        scale=max(scale, largest(theirs)),
        eps=eps,
        value=float(ours[at]) if at >= 0 else None,
        reference_value=float(theirs[at]) if at >= 0 else None,
        host=host,
        non_finite=bool(lost.any()),
        both_non_finite=bool((~np.isfinite(ours) & ~np.isfinite(theirs)).any()),
    )


def _distance(one: Floats, other: Floats) -> float:
    """Return the largest difference of finite elements: a loss scale may make both gradients infinite."""
    if one.shape != other.shape:
        return 0.0
    with np.errstate(invalid="ignore"):
        return largest(one - other)


@dataclass(frozen=True)
class Runs:
    """Hold the traces of one comparison.

    Attributes:
        source: The reference with steps of its own, where `reference` is led step by step by the run that is judged.
    """

    reference: Trace
    topology: Trace
    noise: Sequence[Trace]
    confirmation: Sequence[Trace] = ()
    source: Trace | None = None

    @cached_property
    def as_they_came(self) -> Runs:
        """Return the runs with the reference that led itself: for what the program starts with, reports and ends with."""
        return self if self.source is None else replace(self, reference=self.source, noise=(), confirmation=(), source=None)

    @property
    def others(self) -> list[Trace]:
        """Return the noise runs and then the confirming runs."""
        return [*self.noise, *self.confirmation]

    def pairs(self, optimizer: str) -> list[tuple[StepOfAll, StepOfAll]]:
        """Complete steps that both runs have, in order: (topology, reference)."""
        return list(zip(complete(self.topology, optimizer), complete(self.reference, optimizer), strict=False))

    @cached_property
    def computed(self) -> tuple[Short, ...]:
        """Return the 16-bit precisions that the program computes in."""
        return computed_in(self.reference)

    @cached_property
    def of_first(self) -> tuple[str, ...]:
        """Return scalars that a step assigns and that have the value of the first replica."""
        return Facts.of(self.reference, self.topology).of_first

    def batches(self, optimizer: str) -> tuple[int, int]:
        """Return how many batches a step applies together, in topology and reference; 1 and 1 if that varies."""
        counts = {(_batches(ours), _batches(theirs)) for ours, theirs in self.pairs(optimizer)}
        return counts.pop() if len(counts) == 1 else (1, 1)

    def how(self, optimizer: str) -> str:
        """Return how one gradient is made of the replicas': `sum` or `mean`."""
        return aggregation(self.topology, self.reference, optimizer)

    @property
    def optimizers(self) -> list[str]:
        """Return the optimizers that both runs have."""
        return [name for name in self.reference.optimizers if name in self.topology.optimizers]


def complete(trace: Trace, optimizer: str) -> list[StepOfAll]:
    """Return an optimizer's steps without those at the end that lack replicas (a host was ended in the middle)."""
    steps: list[StepOfAll] = list(trace.steps(optimizer))
    while steps and len(steps[-1]) < len(steps[0]):
        steps.pop()
    return steps


def _batches(step: StepOfAll) -> int:
    return max(one.runs for one in step.values())


def measure_all(runs: Runs) -> Iterator[Measure]:
    """Yield every measure of a comparison: initial weights, each step, final weights, reports."""
    late = {name for name, made in _made_before(runs.as_they_came.reference).items() if made}
    yield from _as_far_as_weights(_initial(runs.as_they_came), _apart_before(runs, but=late) if late else [])
    for optimizer in runs.optimizers:
        others = [complete(trace, optimizer) for trace in runs.others]
        for k, (ours, theirs) in enumerate(runs.pairs(optimizer)):
            beside = [steps[k] if k < len(steps) else {} for steps in others]
            yield from _gradients(runs, optimizer, k, ours, theirs, beside)
            yield from _variables(runs, ("weight", optimizer, k), ours, theirs, beside)
            yield from _variables(runs, ("variable", optimizer, k), ours, theirs, beside)
            yield from _objective(runs, optimizer, k, ours, theirs, beside)
    yield from _reports(runs)
    if runs.source is None:
        yield from _left(runs)
    elif not runs.reference.has_other_examples:
        evaluated = {one.name for one in runs.reference.reports}
        found = (*_left(runs.as_they_came), *_reports(runs.as_they_came))
        of_program = [one for one in found if one.key.tensor not in evaluated]
        yield from _as_far_as_weights(of_program, _apart_before(runs) if of_program else [])


@dataclass(frozen=True)
class _Apart:
    """Hold how far the weights of two runs are apart that went their own ways.

    Attributes:
        largest: The largest difference of an element.
        relative: Of the norms of differences over those of weights the median: few tensors whose gradients are rounding alone
            drift in any case.
    """

    largest: float = 0.0
    relative: float = 0.0


def _as_far_as_weights(measures: Iterable[Measure], apart: Sequence[_Apart]) -> Iterator[Measure]:
    """Yield numbers of two runs that went their own ways: they may be as far apart as the weights before that step."""
    for one in measures:
        if apart:
            at = apart[min(one.step if one.at is None else one.at, len(apart) - 1)]
            spread = at.relative * one.scale if one.key.kind in REPORTED else at.largest
            one = replace(one, spread=float(np.fmax(one.spread, spread)))
        yield one


def _apart_before(runs: Runs, *, but: Collection[str] = ()) -> list[_Apart]:
    """Return how far the weights are apart before each step.

    Args:
        runs: The runs.
        but: Names of weights that are left out.

    Returns:
        Nothing where the reference went its own way.
    """
    if runs.source is None:
        return []
    found = [_Apart()]
    for optimizer in runs.optimizers:
        pairs = zip(complete(runs.topology, optimizer), complete(runs.source, optimizer), strict=False)
        for step, (ours, theirs) in enumerate(pairs, 1):
            found += [found[-1]] * (step + 1 - len(found))
            names = dict.fromkeys(name for one in theirs.values() for name in one.weights if name not in but)
            both = [(weight_of(ours, name), weight_of(theirs, name)) for name in names]
            known = [(a, b) for a, b in both if a is not None and b is not None and is_numeric(b) and _same_shape([a, b])]
            arrays = [finite_difference(*aligned([*pair])) for pair in known]
            offs = [norm(off) / (norm(b) or 1.0) for off, b in arrays]
            here = _Apart(max((largest(off) for off, _ in arrays), default=0.0), float(np.median(offs)) if offs else 0.0)
            so_far = (found[step], found[step - 1], here)
            found[step] = _Apart(max(one.largest for one in so_far), max(one.relative for one in so_far))
    return found


def _initial(runs: Runs) -> Iterator[Measure]:
    """First values. Those of variables that come once others were trained may be made of these, as what is restored is.

    The noise runs, where a program seeds nothing, start from weights of their own: they say something of such variables alone.
    """
    ours, theirs, *others = [_first_values(trace) for trace in (runs.topology, runs.reference, *runs.others)]
    made, many = _made_before(runs.reference), len(runs.noise)
    for tensor in theirs:
        if tensor not in ours or not is_numeric(theirs[tensor]):
            continue
        stored = [one.get(tensor, theirs[tensor]) for one in others] if made[tensor] else []
        if _same_shape([ours[tensor], theirs[tensor], *stored]):
            a, b, *beside = aligned([ours[tensor], theirs[tensor], *stored])
            key, eps = Key("initial-weight", "", tensor), eps_of(theirs[tensor].dtype)
            yield measure(key, made[tensor], a, b, beside[:many], beside[many:], eps=eps)


def _first_values(trace: Trace) -> dict[str, StoredArray]:
    found: dict[str, StoredArray] = {}
    for _, variables in sorted(trace.variables("initial").items()):
        for name, variable in variables.items():
            if variable.array is not None:
                found.setdefault(name, variable.array)
    return found


def _made_before(trace: Trace) -> dict[str, int]:
    """Return, by variable, the steps of any optimizer on its host before it was first seen."""
    made: Counter[tuple[int, str, int]] = Counter()
    found: dict[str, int] = {}
    for host, event in trace.events:
        if event["event"] == "step":
            made[(host, event["optimizer"], event["replica"])] += 1
        elif event["event"] == "initial":
            before = max((count for (place, _, _), count in made.items() if place == host), default=0)
            found |= {name: before for name in event["variables"] if name not in found}
    return found


def _gradients(
    runs: Runs, optimizer: str, k: int, ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    how = runs.how(optimizer)
    for tensor in names_of(theirs):
        mine, reference = gradients_of(ours, tensor), gradients_of(theirs, tensor)
        if not mine or not reference or not _same_shape([*mine.values(), *reference.values()]):
            continue
        stored = [gradients_of(step, tensor) for step in beside]
        arrays = aligned([*mine.values(), *reference.values(), *(a for one in stored for a in one.values())])
        local, arrays = arrays[: len(mine)], arrays[len(mine) :]
        other, arrays = total(arrays[: len(reference)], "sum"), arrays[len(reference) :]
        noise = _totals(arrays, [len(one) for one in stored], other)
        yield measure(
            Key("gradient", optimizer, tensor),
            k,
            total(local, how),
            other,
            noise[: len(runs.noise)],
            noise[len(runs.noise) :],
            eps=unit_of_all([*reference.values(), *mine.values()], runs.computed),
            scale=max(largest(array) for array in local),
        )


def _totals(arrays: list[Floats], counts: list[int], missing: Floats) -> list[Floats]:
    """Return one gradient for each noise run; the reference's own if a run does not have it."""
    found = []
    for count in counts:
        found.append(total(arrays[:count], "sum") if count else missing)
        arrays = arrays[count:]
    return found


def _variables(
    runs: Runs, what: tuple[str, str, int], ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    kind, optimizer, k = what
    value_of = weight_of if kind == "weight" else state_of
    for tensor in dict.fromkeys(
        name for step in theirs.values() for name in (step.weights if kind == "weight" else step.state)
    ):
        a, b = value_of(ours, tensor), value_of(theirs, tensor)
        if a is None or b is None or not (is_numeric(b) or kind == "variable") or not _same_shape([a, b]):
            continue
        stored = [value_of(step, tensor) for step in beside]
        arrays = aligned([a, b, *(one for one in stored if one is not None)])
        rest = iter(arrays[2:])
        noise = [arrays[1] if one is None else next(rest) for one in stored]
        key, eps, many = Key(kind, optimizer, tensor), eps_of(b.dtype), len(runs.noise)
        if kind == "variable" and tensor in runs.of_first:
            key = replace(key, kind="of-first")
        found = measure(key, k, arrays[0], arrays[1], noise[:many], noise[many:], eps=eps)
        if key.kind == "variable" and found.spread > _OF_CHANCE * found.scale:
            ours_, theirs_, *noise = (np.sort(array, axis=0) if array.ndim else array for array in (*arrays[:2], *noise))
            found = measure(key, k, ours_, theirs_, noise[:many], noise[many:], eps=eps)
            found = replace(found, is_of_chance=found.spread > _OF_CHANCE * found.scale)
        yield found


def _objective(
    runs: Runs, optimizer: str, k: int, ours: StepOfAll, theirs: StepOfAll, beside: list[StepOfAll]
) -> Iterator[Measure]:
    values = [objective(step) for step in (ours, theirs, *beside)]
    if values[0] is None or values[1] is None:
        return
    numbers = [np.array([values[1] if value is None else value]) for value in values]
    noise = numbers[2:]
    key, eps = Key("objective", optimizer, "objective"), _precision(runs, theirs)
    yield measure(key, k, numbers[0], numbers[1], noise[: len(runs.noise)], noise[len(runs.noise) :], eps=eps)


def _precision(runs: Runs, step: Mapping[int, Step]) -> float:
    """Return the coarsest unit of a step's gradients."""
    return max((unit_of(a, runs.computed) for one in step.values() for a in one.gradients.values()), default=eps_of("<f4"))


def changed_in_the_end(trace: Trace) -> list[str]:
    """Return trained variables whose values the program replaced after all steps."""
    return list(dict.fromkeys([*(name for _, event in trace.of("left") for name in event["changed"]), *_unseen_updates(trace)]))


def _unseen_updates(trace: Trace) -> list[str]:
    """Return variables that are updated outside of the steps and whose last update nobody saw."""
    made = (one for name in trace.optimizers for step in complete(trace, name) for one in step.values())
    return list(dict.fromkeys(name for one in made for name in one.outside if name not in one.weights))


def ends_of_hosts(trace: Trace) -> dict[str, dict[int, str | None]]:
    """Return, with several hosts, each host's digest of its final value of them; None without one."""
    if trace.num_hosts < 2:
        return {}
    changed = {(host, event["replica"]): event["changed"] for host, event in trace.of("left")}
    ends: dict[str, dict[int, str | None]] = {name: {} for name in changed_in_the_end(trace)}
    for place, variables in trace.variables("left").items():
        for name, found in ends.items():
            found.setdefault(place[0], variables[name].digest if name in changed[place] and name in variables else None)
    return ends


def left_to_compare(runs: Runs) -> list[str]:
    """Return those that one of the runs has changed, if both ended after equally many steps."""
    if not all(any(True for _ in trace.of("left")) for trace in (runs.topology, runs.reference)) or not _as_many_steps(runs):
        return []
    changed = dict.fromkeys([*changed_in_the_end(runs.reference), *changed_in_the_end(runs.topology)])
    unseen = {*_unseen_updates(runs.reference), *_unseen_updates(runs.topology)}
    return [name for name in changed if name not in unseen]


def _left(runs: Runs) -> Iterator[Measure]:
    """Yield the measures of what the program made of its weights after the last step: averages, or the best ones."""
    names = left_to_compare(runs)
    found = [_ended_with(trace, names) for trace in (runs.topology, runs.reference, *runs.others)] if names else []
    step = max((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    for name in names:
        ours, theirs, *beside = [one.get(name) for one in found]
        if ours is None or theirs is None or not is_numeric(theirs) or not _same_shape([ours, theirs]):
            continue
        first, second, *noise = aligned([ours, theirs, *(theirs if one is None else one for one in beside)])
        key, eps, many = Key("final-weight", "", name), eps_of(theirs.dtype), len(runs.noise)
        yield measure(key, step, first, second, noise[:many], noise[many:], eps=eps)


def _ended_with(trace: Trace, names: Collection[str]) -> dict[str, StoredArray]:
    """Return the final values of these variables on the first replica of the first host."""
    steps = [made[-1] for name in trace.optimizers if (made := complete(trace, name))]
    trained = {name: array for step in steps for name in names if (array := weight_of(step, name)) is not None}
    first = next(iter(trace.variables("left").values()), {})
    changed = next((event["changed"] for _, event in trace.of("left")), ())
    return trained | {n: one.array for n, one in first.items() if n in changed and n in names and one.array is not None}


def _reports(runs: Runs) -> Iterator[Measure]:
    by_batch = reported_by_batch(runs)
    ours = reported(runs.topology.reports, {name: (counts[0], how) for name, (counts, how) in by_batch.items()})
    beside_it = {name: (counts[1], how) for name, (counts, how) in by_batch.items()}
    theirs = reported(runs.reference.reports, beside_it)
    others = [reported(trace.reports, beside_it) for trace in runs.others]
    precision = max(
        (_precision(runs, theirs_) for name in runs.optimizers for _, theirs_ in runs.pairs(name)[:1]), default=eps_of("<f4")
    )
    last = max((len(runs.pairs(name)) for name in runs.optimizers), default=1) - 1
    often = Counter((host, kind, name) for host, kind, name, _, _ in ours)
    unlike = {*of_other_steps(runs), *of_other_batches(runs)}
    for place, report in ours.items():
        one = (0, *place[1:])
        if one not in theirs or report.name in unlike:
            continue
        beside = [np.array([values[one].value]) for values in others if one in values]
        many = len(runs.noise) if len(beside) == len(others) else len(beside)
        found = measure(
            Key(report.kind, "", report.name),
            report.step,
            np.array([report.value]),
            np.array([theirs[one].value]),
            beside[:many],
            beside[many:],
            eps=precision,
            host=place[0] if runs.topology.num_hosts > 1 else None,
        )
        yield replace(found, at=_step_of(report, often[place[:3]], last))


def _step_of(report: Report, often: int, last: int) -> int:
    """Return the step of a report, given the number of reports: one for each step, several for each, or fewer."""
    if often < last:
        return _made_after(report, last)
    times = -(-often // (last + 1))
    each = times if times * (last + 1) - often <= times else 1  # those of the step in which runs are held may be missing
    return min(report.step // max(each, 1), last)


def _made_after(report: Report, last: int) -> int:
    """Return the step after which a report was made that is not in every step (an epoch's)."""
    return last if report.made is None else min(max(report.made - 1, 0), last)


def of_other_steps(runs: Runs) -> list[str]:
    """Return the names of reports made once in many steps, if the runs have made different numbers of them."""
    if _as_many_steps(runs):
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    by_step = max(fewest - 1, 2)
    counts = [Counter(one.name for one in trace.reports if one.host == 0) for trace in (runs.topology, runs.reference)]
    return [name for name, count in counts[0].items() if counts[1][name] > 0 and count < by_step]


def _as_many_steps(runs: Runs) -> bool:
    return all(len(complete(runs.topology, name)) == len(complete(runs.reference, name)) for name in runs.optimizers)


def _same_shape(arrays: list[StoredArray]) -> bool:
    return len({array.shape for array in arrays}) == 1
