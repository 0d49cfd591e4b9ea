"""Compare a topology's trace with the reference's, against the noise floor.

Tell a unit on the other side of its kink from a wrong gradient. A ReLU, a maximum or a comparison makes rounding visible: a
pre-activation of 1e-9 is positive in one run and negative in the other, and a whole row's contribution to some gradients
appears or is gone. That is no fault of the program; the noise runs show it too, but not necessarily in the same step. It looks
like this: after steps in which everything agreed to rounding, the *gradients* of one step differ by a little. From then on the
runs are disturbed, and more units fall. A bug is there from the first step on and in each of them, or is large when it comes,
or shows in the weights before the gradients. A count or an accuracy that jumps by an example now and then, while all gradients
agree, is a kink too.

What a unit can do is a part of what one example does, and that depends on how many there are: of a few, one that falls off the
margin of a hinge takes a large part of the gradient with it. Such a size alone excuses nothing: runs of one device that are
rounded more coarsely must differ as much (`confirmation`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from emulate.grouping import grouped
from emulate.told import Told, told
from emulate.trace import Trace
from emulate.verify.compared_runs import Runs, complete
from emulate.verify.gradients import GradientView, names_of, taped_views, views
from emulate.verify.measure import Measure, of_other_batches, of_other_steps, of_own_statistics
from emulate.verify.measures import measure_all
from emulate.verify.noise import FACTOR, REPORTED, Key, floors
from emulate.verify.verdict import MOST_STEPS, Difference, Farthest

SMALL = 1e-2
"""Largest relative L2 difference that a few units of one example cause in a gradient, however many examples there are."""
HEAVY = 2.0
"""So many times as much as a usual example one may weigh that falls on the other side of its kink."""
FADES = 0.1
"""Fraction of the largest difference from which a later step counts as its return."""
JUMP = 0.05
"""Largest relative jump of a metric that single examples may explain, however many there are."""
SELDOM = 0.25
"""Largest fraction of a metric's values that may jump."""
CLEAR = 1e3
"""So many times the floor, a hundred times what counts as a difference, no further noise run explains a gradient."""


def kink_onset(points: Sequence[Point], examples: Mapping[int, int]) -> int | None:
    """Return the step from which on kinks may explain all differences; None if they cannot, or there are none.

    Args:
        points: What was compared.
        examples: The number of examples of each step; 0 where it is not known.

    Returns:
        The step.
    """
    out = _out(points)
    if not out:
        return None
    first = min(p.step for p in out)
    kinds = {p.measure.key.kind for p in out if p.step == first}
    if "gradient" in kinds:
        of_first = (p for p in out if p.step == first and p.measure.key.kind == "gradient")
        # Gradients of single examples point anywhere: the sum of n is as long as the root of n of them.
        small = max(SMALL, HEAVY / math.sqrt(examples[first])) if examples.get(first) else SMALL
        starts_small = all(p.measure.relative < small for p in of_first)
        return first if starts_small and (first > 0 or not _comes_back(points)) else None
    return first if kinds == {"metric"} and _jumps_seldom(points, out, examples) else None


def cancelled_onset(points: Sequence[Point]) -> int | None:
    """Return the step from which on weights differ although no gradient does; None if something else differs first.

    A gradient that cancels over the batch is rounding alone: an optimizer that divides by its size makes a step of it.
    """
    out = _out(points)
    if not out:
        return None
    first = min(p.step for p in out)
    return first if {p.measure.key.kind for p in out if p.step == first} == {"weight"} else None


def _out(points: Sequence[Point]) -> list[Point]:
    """Return what is beyond the noise floor; nothing if rounding cannot be the reason."""
    out = [p for p in points if p.exceeds and p.measure.key.kind != "objective"]
    return [] if any(p.measure.non_finite or (p.measure.key.kind == "initial-weight" and not p.step) for p in out) else out


def _comes_back(points: Sequence[Point]) -> bool:
    """Return whether most steps after the first difference have one of about the same relative size."""
    by_step: dict[int, float] = defaultdict(float)
    for p in points:
        if p.measure.key.kind == "gradient":
            by_step[p.step] = max(by_step[p.step], p.measure.relative if p.exceeds else 0.0)
    sizes = [by_step[k] for k in sorted(by_step)]
    again = [size for size in sizes if size >= FADES * max(sizes)]
    return len(again) >= max(2, len(sizes) / 2) or len(sizes) == 1


def _jumps_seldom(points: Sequence[Point], out: Sequence[Point], examples: Mapping[int, int]) -> bool:
    def is_of_one(p: Point) -> bool:
        """Return whether one example more or less makes that of an accuracy: it is at most 1, or 100 in percent."""
        m = p.measure
        most = 1.0 if max(abs(m.value or 0.0), abs(m.reference_value or 0.0)) <= 1 else 100.0
        return m.key.kind == "metric" and round(m.error / most * (examples.get(p.step) or math.inf), 3) <= 1

    if not all(p.measure.key.kind in REPORTED and (p.measure.relative <= JUMP or is_of_one(p)) for p in out):
        return False
    names = {p.measure.key for p in out}
    return all(_count(out, name) <= SELDOM * _count(points, name) for name in names)


def _count(points: Sequence[Point], key: object) -> int:
    return sum(p.measure.key == key for p in points)


KINDS = ("initial-weight", "gradient", "weight", "variable", "loss", "metric", "final-weight")
"""Order in which the differences of one step arise."""
_HIGH = 0.3
"""From this part of a gradient on it is said that less than that is not seen."""


@dataclass(frozen=True)
class Point:
    """Hold a measure with its noise floor."""

    measure: Measure
    noise: float

    @property
    def ratio(self) -> float:
        """Return the error in units of the noise floor."""
        if self.measure.non_finite:
            return float("inf")
        return self.measure.error / self.noise if self.noise else (float("inf") if self.measure.error else 0.0)

    @property
    def step(self) -> int:
        """Return the training step of the measure."""
        return self.measure.step if self.measure.at is None else self.measure.at

    @property
    def is_late(self) -> bool:
        """Return whether it is reported once in many steps."""
        return self.measure.at not in (None, self.measure.step)

    @property
    def factor(self) -> float:
        """Return the differing element as a multiple of the reference's."""
        ours, theirs = self.measure.value, self.measure.reference_value
        return ours / theirs if ours is not None and theirs else float("nan")

    @property
    def exceeds(self) -> bool:
        """Return whether the difference is more than rounding."""
        return self.ratio > FACTOR

    def difference(self) -> Difference:
        """Return the difference in the verdict's form."""
        m = self.measure
        return Difference(
            tensor=m.key.tensor,
            kind=m.key.kind,
            step=self.step,
            error=m.error,
            noise=self.noise,
            replica=m.replica,
            host=m.host,
            optimizer=m.key.optimizer or None,
            value=m.value,
            reference_value=m.reference_value,
            non_finite=m.non_finite,
            report=None if m.at is None or m.at == m.step else m.step,
        )


@dataclass(frozen=True)
class Comparison:
    """Hold the result of a comparison.

    Attributes:
        points: Every tensor and step that was compared, and every reported number.
        objectives: The sums of the local objectives; evidence for causes, they decide nothing by themselves.
        of_first: Single numbers of the first replica that the steps assign; the same.
        needs_confirmation: Every difference could be one unit (a ReLU, a maximum) that fell on the other side of its kink.
            Make noise runs with a larger perturbation and compare again with them as `confirmation`.
        cancels: Weights differ first, where no gradient does: it could be gradients that cancel over the batch. The same.
        steps: Steps compared of each optimizer.
        not_compared: What only one run has.
    """

    runs: Runs
    points: tuple[Point, ...]
    objectives: tuple[Point, ...]
    of_first: tuple[Point, ...]
    needs_confirmation: bool
    cancels: bool
    steps: Mapping[str, int]
    not_compared: tuple[Told, ...] = ()
    notes: tuple[Told, ...] = field(default=())

    @cached_property
    def exceeding(self) -> tuple[Point, ...]:
        """Return what is more than rounding, in the order of computation."""
        return tuple(
            sorted((p for p in self.points if p.exceeds), key=lambda p: (p.step, _place(p.measure.key.kind), -p.ratio))
        )

    @property
    def is_clear(self) -> bool:
        """Return whether the first difference is so large that no further noise run can make rounding of it.

        Of weights that is known beside a confirming run alone: an optimizer makes a step of a gradient that cancels.
        """
        kinds = ("gradient", "weight") if self.runs.confirmation else ("gradient",)
        step = self.exceeding[0].step if self.exceeding else None
        return any(p.ratio > CLEAR for p in self.exceeding if p.step == step and p.measure.key.kind in kinds)

    @property
    def first(self) -> Difference | None:
        """Return the first divergence: the earliest step, in a step the first kind, then the clearest."""
        return self.exceeding[0].difference() if self.exceeding else None

    @property
    def worst(self) -> Difference | None:
        """Return the largest difference in units of the noise floor, even if it is only rounding."""
        return max(self.points, key=lambda p: p.ratio).difference() if self.points else None

    @property
    def worst_by_rounding(self) -> Difference | None:
        """Return the largest difference that is only rounding."""
        within = [point for point in self.points if not point.exceeds]
        return max(within, key=lambda point: point.ratio).difference() if within else self.worst

    @property
    def course(self) -> tuple[Farthest, ...]:
        """Return the largest difference of each kind in each step, in the order of computation."""
        width = 1 + max((point.step for point in self.points), default=0) // MOST_STEPS
        farthest: dict[tuple[int, str, int], Point] = {}
        for point in self.points:
            at = (_place(point.measure.key.kind), point.measure.key.kind, point.step // width)
            if at not in farthest or point.ratio > farthest[at].ratio:
                farthest[at] = point
        return tuple(
            Farthest(p.measure.key.kind, p.step, p.measure.key.tensor, p.measure.error, p.noise, p.measure.non_finite)
            for _, p in sorted(farthest.items())
        )

    @property
    def is_equivalent(self) -> bool:
        """Return whether nothing differs by more than rounding (and something was compared)."""
        return bool(self.points) and not self.exceeding

    @property
    def differs_in_late_reports(self) -> bool:
        """Return whether reports alone differ, and one of them is made once in many steps, by an evaluation for example.

        Rounding moves weights that no gradient depends on (a bias before BatchNormalization), and examples over the threshold
        of a metric. Evaluated noise runs do not have such numbers, so their floor is only estimated.
        """
        return any(point.is_late for point in self.exceeding) and all(
            point.measure.key.kind in REPORTED for point in self.exceeding
        )

    def kinds(self) -> set[str]:
        """Return the kinds of which numbers were compared; an objective counts as a loss."""
        kinds = {point.measure.key.kind for point in self.points if point.measure.compares}
        return kinds | {"loss"} if any(point.measure.compares for point in self.objectives) else kinds

    def views(self, optimizer: str, step: int) -> list[GradientView]:
        """Return every tensor's gradient of one step; for nearly canceling ones with the largest floor of any step."""
        runs, of_step = self.runs, ("gradient", optimizer, step)
        points = _as_in_the_second_step(self.points) if step == 0 else self.points
        noise = {
            point.measure.key.tensor: point.noise
            for point in points
            if (point.measure.key.kind, point.measure.key.optimizer, point.measure.step) == of_step
        }
        return list(views(runs.reference, runs.topology, optimizer, step, noise, runs.how(optimizer)))

    def taped_views(self, optimizer: str, step: int) -> list[GradientView]:
        """Return the same for the tapes' gradients, if the program sums them itself."""
        runs = self.runs
        return taped_views(runs.reference, runs.topology, optimizer, step, self.views(optimizer, step))

    def before(self, step: int, at: Sequence[str] = ()) -> Comparison:
        """Return what was compared before a step, and in the step itself for the kinds `at`."""

        def stays(point: Point) -> bool:
            kind = point.measure.key.kind
            return point.step < step or (point.step == step and kind in at) or kind == "initial-weight"

        groups = (self.points, self.objectives, self.of_first)
        points, objectives, of_first = (tuple(p for p in group if stays(p)) for group in groups)
        return replace(self, points=points, objectives=objectives, of_first=of_first)

    @property
    def non_finite_after(self) -> int | None:
        """Return the step after which weights of both runs are not finite any more; None if they are."""
        weights = [point for point in self.points if point.measure.key.kind == "weight"]
        lost = {point.step for point in weights if point.measure.both_non_finite}
        return min(lost) if lost and max(point.step for point in weights) in lost else None

    @property
    def drowned_from(self) -> int | None:
        """Return the step from which on gradients are mostly rounding; None if they never are."""
        amplified = _amplified(self.points)
        return None if amplified is None else amplified[0]

    @property
    def weights_apart(self) -> int | None:
        """Return the step after which each run has weights of its own; None where the reference is led, or they agree."""
        return None if self.runs.reference.follows else self.first_step("weight")

    def with_noise_of(self, other: Comparison) -> Comparison:
        """Return the comparison with the noise floors of another one of the same steps, where they are higher."""

        def changed(points: Sequence[Point], others: Sequence[Point]) -> tuple[Point, ...]:
            noise_of = {(point.measure.key, point.step): point.noise for point in others}
            return tuple(
                replace(point, noise=max(point.noise, noise_of.get((point.measure.key, point.step), 0.0))) for point in points
            )

        return replace(
            self,
            points=changed(self.points, other.points),
            objectives=changed(self.objectives, other.objectives),
            of_first=changed(self.of_first, other.of_first),
        )

    def first_step(self, *kinds: str) -> int | None:
        """Return the earliest step in which something of these kinds differs."""
        return min((p.measure.step for p in self.exceeding if p.measure.key.kind in kinds), default=None)


def compare(
    reference: Trace,
    topology: Trace,
    noise: Sequence[Trace] = (),
    *,
    confirmation: Sequence[Trace] = (),
    source: Trace | None = None,
    reported: Sequence[Trace] = (),
) -> Comparison:
    """Compare a run on a topology with the reference.

    Args:
        reference: The run on one device.
        topology: The run to judge.
        noise: Replays of the reference with permuted rows and gradients off by one unit in the last place.
        confirmation: Replays with a larger perturbation, where a first comparison asked for them.
        source: The run on one device with its own gradients, where `reference` applies the topology's.
        reported: Runs of the program on one device, at the same weights or rounded otherwise, where a first comparison asked.

    Returns:
        Every tensor, step and report of both runs with its error and its noise floor.
    """
    runs = Runs(reference, topology, noise, confirmation, source, reported)
    measures = list(measure_all(runs))
    of_chance = list(dict.fromkeys(m.key.tensor for m in measures if m.is_of_chance))
    compared = [m for m in measures if not (m.key.kind == "variable" and m.key.tensor in of_chance)]
    points = _points(compared, lockstep=reference.follows or topology.follows)
    kink, cancelled = kink_onset(points, runs.examples), cancelled_onset(points)
    onset = kink if kink is not None else cancelled
    if onset is not None and confirmation:
        points = [replace(p, noise=max(p.noise, p.measure.confirmed)) if p.step >= onset else p for p in points]
        points = points if kink != 0 else _as_in_the_second_step(points)
    return Comparison(
        runs=runs,
        points=tuple(p for p in points if p.measure.key.kind not in ("objective", "of-first")),
        objectives=tuple(p for p in points if p.measure.key.kind == "objective"),
        of_first=tuple(p for p in points if p.measure.key.kind == "of-first"),
        needs_confirmation=kink is not None and not confirmation,
        cancels=cancelled is not None and not confirmation,
        steps={name: len(runs.pairs(name)) for name in runs.optimizers},
        not_compared=(
            *_not_compared(runs),
            *map(
                told("depends-on-order")("variable {} (it depends on the order of the examples in a batch)").format, of_chance
            ),
        ),
        notes=tuple(_notes(points, (kink, cancelled) if confirmation else (None, None), bool(noise))),
    )


def explains_up_to(again: Comparison | None, step: int, before: Comparison) -> bool:
    """Return whether the gradients agree up to and in the step that differed before, and a difference would be visible."""
    if again is None:
        return False
    onset = again.first_step("initial-weight", "gradient", "weight")
    compared = any(p.step == step and p.measure.key.kind == "gradient" for p in again.points)
    return compared and (onset is None or onset > step) and _would_show(again, before, step)


def _would_show(again: Comparison, before: Comparison, step: int) -> bool:
    """Return whether the clearest difference is more than rounding here."""
    out = [p for p in before.exceeding if p.measure.key.kind in ("gradient", "weight") and p.step <= step]
    if not out:
        return True
    clearest = max(out, key=lambda point: point.ratio).measure
    floor = next((p.noise for p in again.points if (p.measure.key, p.step) == (clearest.key, clearest.step)), 0.0)
    return clearest.non_finite or clearest.error > FACTOR * floor


def _points(measures: Sequence[Measure], *, lockstep: bool) -> list[Point]:
    spreads: dict[Key, dict[int, float]] = {}
    scales: dict[Key, dict[int, float]] = {}
    units: dict[Key, float] = {}
    for m in measures:
        spreads.setdefault(m.key, {})[m.step] = float(np.fmax(m.spread, spreads.get(m.key, {}).get(m.step, math.nan)))
        scales.setdefault(m.key, {})[m.step] = max(m.scale, scales.get(m.key, {}).get(m.step, 0.0))
        units[m.key] = max(m.eps, units.get(m.key, 0.0))
    noise = floors(spreads, scales, units, lockstep=lockstep)
    return [Point(m, noise[m.key][m.step]) for m in measures]


def _as_in_the_second_step(points: Sequence[Point]) -> list[Point]:
    """Return the points with the second step's floor for the first step, for tensors that nearly cancel.

    A gradient that cancels within a row (the query of an additive attention) shows what rounding makes of the forward pass,
    which is another one in a batch of another size. In the first step noise runs have the reference's weights to the bit, and
    each row the bits of its forward pass wherever it stands: what rounding makes of it is seen from the second step on.
    """
    of_first = [p.measure for p in points if p.step == 0 and p.measure.key.kind == "gradient"]
    largest = max((m.scale for m in of_first), default=0.0)
    tiny = {(m.key.optimizer, m.key.tensor) for m in of_first if m.scale < m.eps**0.5 * largest}
    second = [p.measure for p in points if p.step == 1 and p.measure.scale and not math.isnan(p.measure.spread)]
    shares = {measure.key: measure.spread / measure.scale for measure in second}

    def floor(point: Point) -> float:
        m = point.measure
        is_tiny = m.key.kind in ("gradient", "weight") and (m.key.optimizer, m.key.tensor) in tiny
        return max(point.noise, shares.get(m.key, 0.0) * m.scale) if is_tiny and point.step == 0 else point.noise

    return [replace(point, noise=floor(point)) for point in points]


ONE_RUN = told("steps-in-one-run")("{} of {} (only one run went so far)")
_OF_OTHER_CODE = told("other-examples-before")("{} (one device ran the steps alone here, without the code that reports it)")


def _not_compared(runs: Runs) -> list[Told]:
    known = set(runs.reference.optimizers)
    lone = {name: "reference" if name in known else "topology" for name in sorted(known ^ set(runs.topology.optimizers))}
    texts = [told("optimizer-in-one-run")(f"optimizer {name} (it steps only in the {where})") for name, where in lone.items()]
    for optimizer in runs.optimizers:
        for ours, theirs in runs.pairs(optimizer)[:1]:
            apart = set(names_of(ours)) ^ set(names_of(theirs))
            texts += [told("gradient-in-one-run")(f"gradient of {name} (not in both runs)") for name in sorted(apart)]
        lengths = [len(complete(trace, optimizer)) for trace in (runs.topology, runs.reference)]
        if lengths[0] != lengths[1]:
            first, last = min(lengths), max(lengths) - 1
            which = f"steps {first} to {last}" if first < last else f"step {first}"
            texts.append(ONE_RUN.format(which, optimizer))
    if runs.reference.has_other_examples:
        evaluated = {report.name for report in runs.reference.reports}
        others = dict.fromkeys(report.name for report in runs.topology.reports if report.name not in evaluated)
        texts += map(_OF_OTHER_CODE.format, others)
    texts += [told("other-batches")(f"{name} (in other batches, with the same total)") for name in of_other_batches(runs)]
    own = told("own-moving-statistics")("{} (each replica evaluates with the moving statistics of its own examples)")
    steps = told("other-number-of-steps")("{} (over all steps before it, and the runs made different numbers of steps)")
    return [*texts, *map(own.format, of_own_statistics(runs)), *map(steps.format, of_other_steps(runs))]


_UNMEASURED = told("noise-not-measured")(
    "the noise floor was not measured: gpudist assumed a few units in the last place, and rounding errors may exceed it"
)
_CANCELLED = told("cancelling-gradients")(
    "from step {} on gradients that cancel over the batch are rounding errors alone, and the optimizer makes steps from them: "
    "the noise floor there comes from runs on one device that were rounded as much as this run's sums"
)
_KINK = told("kinks")(
    "from step {} on rounding may switch single units of a ReLU or a maximum on or off: the noise floor there comes from runs "
    "on one device with a larger perturbation"
)
_AMPLIFIED = told("amplified-rounding")(
    "from step {} on rounding errors are amplified, as in deep networks: gpudist cannot see differences {} there, but it sees "
    "those of losses; --precision float64 sees more"
)


def _notes(points: Sequence[Point], onsets: tuple[int | None, int | None], has_noise: bool) -> list[Told]:
    notes = []
    if points and not has_noise:
        notes.append(_UNMEASURED)
    apart = min((p.step for p in points if p.exceeds), default=None)  # later what is led by this run is so because of it
    both = [p.measure for p in points if p.measure.both_non_finite and (apart is None or p.step < apart)]
    if both:
        notes.append(told("not-finite")(f"{both[0].key.tensor} is not finite from step {both[0].step} on, on one device too"))
    kink, cancelled = onsets
    if cancelled is not None and not any(point.exceeds for point in points):
        notes.append(_CANCELLED.format(cancelled))
    if kink is not None:
        notes.append(_KINK.format(kink))
    if amplified := _amplified(points):
        step, share = amplified
        size = "as large as the gradients themselves" if share > 1 else f"of less than about {share:.0%} of the gradients"
        notes.append(_AMPLIFIED.format(step, size))
    return notes


def _amplified(points: Sequence[Point]) -> tuple[int, float] | None:
    """Return from which step on a large part of a gradient can hide below the noise floor, and which part; or None."""
    of_gradients = [p for p in points if p.measure.key.kind == "gradient" and p.measure.scale > 0]
    floors = grouped((p.step, FACTOR * p.noise / p.measure.scale) for p in of_gradients)
    hidden = {step: float(np.median(shares)) for step, shares in sorted(floors.items())}
    least = max(_HIGH, 10 * next(iter(hidden.values()), 0.0))
    onset = next((step for step, share in hidden.items() if share > least), None)
    return None if onset is None else (onset, max(hidden.values()))


def _place(kind: str) -> int:
    """Return the place of a kind in a step."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)
