"""Collect everything known about one topology's run, for the causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from emulate.recorder import SYNCHRONIZED
from emulate.told import Told, told
from emulate.trace import Facts, Trace, Variable
from emulate.verify.arithmetic import ROUND, Explanation, Fit, explain
from emulate.verify.compare import Comparison, Point, compare, explains_up_to
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import aligned, norm, weights_before
from emulate.verify.joins import Joins
from emulate.verify.ledger import Ledger
from emulate.verify.ledgers import is_in_order, ledgers
from emulate.verify.lines import ProgramLines, located, operations
from emulate.verify.recorded import (
    Recorded,
    RunPair,
    computes_the_same,
    differing,
    draws_the_same,
    initial,
    starts_alike,
    trains_on_the_same,
)
from emulate.verify.recovery import Recovery
from emulate.verify.result import Met, Outcome, trace_of
from emulate.verify.run_spec import BY_LOSS, BY_SHARE
from emulate.verify.verdict import Difference, Finding


@dataclass(frozen=True)
class Disagreement:
    """Describe a variable whose value differs between replicas.

    Attributes:
        step: The step after which it differs, -1 for the initial value.
        groups: Who agrees with whom: lists of replicas (for the initial value `host h replica r`).
        tensors: How many variables differ then.
    """

    tensor: str
    step: int
    optimizer: str | None
    groups: tuple[tuple[str, ...], ...]
    tensors: int


@dataclass(frozen=True)
class Agreement:
    """Hold the result.

    Attributes:
        checked: In how many steps at least two replicas could be compared.
        rounded: Variables on which replicas agree but for the rounding of sums.
    """

    initial: Disagreement | None
    first: Disagreement | None
    checked: int
    rounded: tuple[str, ...] = ()


def agreement(trace: Trace) -> Agreement:
    """Check a trace. Only trainable variables count: moving statistics and metrics may differ between replicas."""
    initial = trace.variables("initial")
    start = _differing({f"host {host} replica {replica}": values for (host, replica), values in sorted(initial.items())})
    before = _disagreement(start, -1, None) if start else None
    disagreements: list[Disagreement] = []
    checked, rounded = 0, set()
    for optimizer in trace.optimizers:
        moved: dict[str, float] = defaultdict(float)
        for k, step in enumerate(complete(trace, optimizer)):
            checked += len(step) > 1
            apart = _differing({f"replica {replica}": local.weights for replica, local in sorted(step.items())})
            by_rounding = {tensor for tensor in apart if _is_rounding(trace, optimizer, k, tensor, moved)}
            rounded |= by_rounding
            if apart.keys() - by_rounding:
                disagreements.append(_disagreement({t: g for t, g in apart.items() if t not in by_rounding}, k, optimizer))
                break
    first = min(disagreements, key=lambda d: d.step) if disagreements else None
    return Agreement(before, first, checked, tuple(sorted(rounded)))


def _is_rounding(trace: Trace, optimizer: str, k: int, tensor: str, moved: dict[str, float]) -> bool:
    """Return whether replicas differ as far as sums of the same numbers in another order do.

    Each replica adds up by itself the rows of a sparse gradient that name the same row of a table, and threads do so in any
    order. `moved` has how far the steps moved each table.
    """
    step = complete(trace, optimizer)[k]
    gradients = [local.gradients.get(tensor) for local in step.values()]
    if not any(gradient is not None and gradient.rows is not None for gradient in gradients):
        return False
    copies = {local.weights[tensor].digest: local.weights[tensor].array for local in step.values()}
    before = weights_before(trace, optimizer, k, tensor, min(step))
    stored = [array for array in (before, *copies.values()) if array is not None]
    if len(stored) <= len(copies):
        return False
    old, first, *others = aligned(stored)
    moved[tensor] += norm(first - old)
    return all(norm(other - first) <= ROUND * moved[tensor] for other in others)


def _differing(values: Mapping[str, Mapping[str, Variable]]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return each variable that differs, with the groups of replicas that agree."""
    groups: dict[str, dict[str, list[str]]] = {}
    for who, variables in values.items():
        for name, variable in variables.items():
            if variable.trainable:
                groups.setdefault(name, {}).setdefault(variable.digest, []).append(who)
    return {name: tuple(tuple(g) for g in by_digest.values()) for name, by_digest in groups.items() if len(by_digest) > 1}


def _disagreement(apart: Mapping[str, tuple[tuple[str, ...], ...]], step: int, optimizer: str | None) -> Disagreement:
    tensor = next(iter(apart))
    return Disagreement(tensor, step, optimizer, apart[tensor], len(apart))


_UPDATED = "the updates before it are others"
_ON_ITS_OWN = "gradients, weights and losses were compared with one device that got this run's own"
_BY_SOME_INPUTS = told("examples-by-some-inputs")(
    "gpudist identifies examples only by {} of the step: the other inputs differ, as padding does, or values that the program "
    "computes with its model and passes to the step"
)
_DROPPED = told("remainder-dropped")(
    "{} examples of one device are dropped: an epoch does not divide by the larger batch, and the remainder is dropped"
)


LATER = "later-steps"
"""Code of what says that a step and later ones are not compared."""


def _inputs(places: Sequence[int]) -> str:
    numbers = ", ".join(str(place + 1) for place in places)
    return f"input {numbers}" if len(places) == 1 else f"inputs {numbers}"


class Case:
    """Hold what is known of one topology's run beside the reference, and what has been explained of it.

    Making a case starts nothing. `compare` and `choose_base` ask the lab for what it takes to compare the runs, then causes ask
    it for more, always by one of its methods.

    Args:
        pair: The reference and the run to judge.
        lab: Makes the further runs that tell more.
        plain: The reference run with the program's own randomness; that of the pair unless given.
        same_seed: Another run on one device that begins as `plain` does, with the examples and draws of the program; the first
            noise run where `plain` is the pair's.
        untouched: The topology's run with the program's own randomness; that of the pair unless given.
        outcome: How the run ended.
        recovery: What became of the program with faults.
        is_of_groups: Whether the reference does what each replica does with its own examples, and the sum of that depends on
            which replica has which.
        met_alone: Where runs on one device met other runs, files outside of the folders that each has to itself: `plain`, then
            others. The repeated reference comes between them.
        met: The same of these and the topology's together.

    Attributes:
        undecided: By code of a cause why it cannot be told whether it is there.
        allow: Codes of causes that are expected. They hide no cause that decides.
        joined: What must see the whole batch, as far as causes have said it.
        clips_the_sum: Whether the base, which explains the run, does once with the gradients of all replicas what the program
            does with gradients by itself.
    """

    def __init__(
        self,
        pair: RunPair,
        lab: Recorded,
        *,
        plain: Trace | None = None,
        same_seed: Trace | None = None,
        untouched: Trace | None = None,
        outcome: Outcome | None = None,
        recovery: Recovery | None = None,
        is_of_groups: bool = False,
        met_alone: Sequence[Met] = (),
        met: Met | None = None,
    ) -> None:
        self.pair, self.lab = pair, lab
        self.reference, self.topology = pair.reference, pair.topology
        self.plain = plain or pair.reference
        self._same_seed = same_seed
        self.untouched = untouched or pair.topology
        self.outcome = outcome or Outcome()
        self.recovery = recovery
        self.is_of_groups = is_of_groups
        self._met_alone, self.met = met_alone, met or Met()
        self.found: list[Finding] = []
        self.notes: list[Told] = []
        self.unreachable: list[Told] = []
        self.undecided: dict[str, Told] = {}
        self.allow: Collection[str] = ()
        self.clips_the_sum = False
        # Invariant: a switch that was asked for beside the same kept switches is not run again.
        self._switched: dict[tuple[str, ...], Comparison | None] = {}
        # Invariant: the base has exactly these switched off, if it is not what came.
        self._kept: tuple[str, ...] = ()
        self._joins: dict[tuple[str, ...], Joins | None] = {}
        self.joined: list[Joins] = []
        self._comparison: Comparison | None = None
        # Invariant: set once, and only after the comparison; then changed by `rebase` alone, which forgets the two below.
        self._base: Comparison | None = None
        self._explanation: Explanation | None = None
        self._explained: list[Callable[[Point], bool]] = []
        self._explained_always: list[Callable[[Point], bool]] = []
        # Invariant: a subset of what was ever explained; what is set aside stays so when the base changes.
        self._aside: list[Callable[[Point], bool]] = []

    def compare(self) -> Comparison:
        """Compare the original runs, once, with as many noise runs as it takes."""
        if self._comparison is None:
            normalized = None
            if not self.lab.has_noise(self.pair) and self.topology.num_steps:
                normalized = self.normalize_alike()
            if normalized is not None:
                self._comparison = compare(self.reference, self.topology).with_noise_of(normalized[1])
            else:
                self._comparison = self.lab.compare(self.pair, kinks=True, is_known=self._is_known)
        return self._comparison

    @property
    def comparison(self) -> Comparison:
        """Return the comparison of the original runs, which was made before."""
        assert self._comparison is not None
        return self._comparison

    def _is_known(self, beside_one: Comparison) -> bool:
        """Return whether one noise run says enough: rounding is no reason for replicas to have different weights."""
        apart, first = self.agreement.first, beside_one.first
        return (apart is not None and first is not None and apart.step <= first.step) or self._agrees_normalized_alike()

    def _agrees_normalized_alike(self) -> bool:
        """Return whether BatchNormalization alone makes the difference: then one noise run says enough."""
        normalized = self.normalize_alike()
        return normalized is not None and normalized[1].is_equivalent

    def normalize_alike(self) -> tuple[str, Comparison] | None:
        """Compare with the same BatchNormalization on both sides; return what was switched for it, and the comparison.

        One device normalizes each replica's rows by themselves, which needs no run of the topology. Where its statistics are
        not the replicas' in the first step (its batches are other rows), the replicas synchronize theirs.
        """
        if not self.facts.batchnorm or self.num_replicas < 2 or self.has_ended_early:
            return None
        by_share = self.switch(BY_SHARE)
        if by_share is not None:
            first = [p for p in by_share.points if p.step == 0 and p.measure.key.tensor in self.facts.batchnorm]
            if first and not any(point.exceeds for point in first):
                return BY_SHARE, by_share
        synchronized = self.switch(SYNCHRONIZED)
        return (SYNCHRONIZED, synchronized) if synchronized is not None and synchronized.points else None

    def repeat(self) -> Trace | None:
        """Run the unchanged reference once more; return None where that run did not end well."""
        return trace_of(self.lab.repeat())

    @cached_property
    def repeat_apart(self) -> str | None:
        """Return in what two equal runs on one device differ; None where in nothing, or the second did not end well."""
        again = self.repeat()
        return None if again is None else differing(self.plain, again) or self.drifted(again)

    def drifted(self, again: Trace) -> str | None:
        """Return what a repeated run makes of the same examples, weights and draws otherwise, beyond the effect of threads."""
        if not self.lab.measure_noise(self.pair, 1) and computes_the_same(self.plain, again):
            return None  # without a noise run nothing says what threads make of gradients that cancel
        first = self.compare_with_noise(self.plain, again).first
        if first is None:
            return None
        return f"the {'losses' if first.kind == 'loss' else f'{first.kind}s'} (first {first.tensor} in step {first.step})"

    def check_that_it_repeats(self) -> bool:
        """Return whether two equal runs on one device seem to be equal, so that no run need be spent on that question.

        Another run has its first weights, examples and draws then. Where none was made on one device, the topology's says it.
        """
        if self._same_seed is None:
            compared = self.comparison.is_equivalent or self._agrees_normalized_alike()
            agrees = compared or starts_alike(self.plain, self.untouched) or self._computes_alike_at_first()
            is_same = agrees and trains_on_the_same(self.plain, self.untouched) and draws_the_same(self.plain, self.untouched)
        else:
            is_same = differing(self.plain, self._same_seed) is None
        return is_same and bool(self.lab.measure_noise(self.pair, 1) or self.normalize_alike())

    def _computes_alike_at_first(self) -> bool:
        """Return whether the first step has the gradients of the same weights, where nobody saw their values."""
        is_unseen = not any(initial(self.untouched)) and "gradient" in self.base.kinds()
        return is_unseen and all(step > 0 for _, step in self.explain_gradients().unexplained)

    def compare_with_noise(self, reference: Trace, topology: Trace) -> Comparison:
        """Compare two other traces beside the noise of the reference, and beside more of it where kinks may differ."""
        comparison = self.lab.compare_enough(replace(self.pair, reference=reference, topology=topology))
        confirmation = self.lab.confirm(self.pair) if comparison.needs_confirmation else ()
        return compare(reference, topology, comparison.runs.noise, confirmation=confirmation) if confirmation else comparison

    def meet_alone(self) -> list[Met]:
        """Repeat the reference; return where runs on one device met other runs: the reference, its repeat, then the others."""
        again = self.lab.repeat()
        return [*self._met_alone[:1], *([] if again is None else [again.met]), *self._met_alone[1:]]

    @cached_property
    def lines(self) -> ProgramLines:
        """Return what the runs recorded of the user's lines."""
        return ProgramLines(self.untouched, self.plain, outcome=self.outcome)

    @cached_property
    def facts(self) -> Facts:
        """Return what the probe learned about the program."""
        return Facts.of(self.reference, self.topology)

    @cached_property
    def ledgers(self) -> dict[str, Ledger]:
        """Return the data ledger of each optimizer."""
        # A program that stops early may stop elsewhere by its own draws: then these say nothing of its examples. Not always of
        # the compared run: layers in 32 bits get examples with other bits than those of the plain reference.
        ends_alike = self.untouched.num_steps == self.topology.num_steps
        return ledgers(self.plain, self.untouched if ends_alike else self.topology)

    @property
    def ledger(self) -> Ledger | None:
        """Return the ledger with a problem, else that of the optimizer with the most steps."""
        known = [ledger for ledger in self.ledgers.values() if ledger.is_known]
        longest = max(known, key=lambda ledger: len(ledger.topology), default=None)
        return next((ledger for ledger in known if not ledger.is_same), longest)

    @cached_property
    def agreement(self) -> Agreement:
        """Return whether the replicas agree."""
        return agreement(self.untouched)

    @cached_property
    def num_replicas(self) -> int:
        """Return the number of replicas of the program's strategy: the largest of several, 1 without a strategy."""
        return max(
            (int(event["replicas"]) for _, event in self.untouched.of("strategy")), default=len(self.untouched.replicas) or 1
        )

    @property
    def base(self) -> Comparison:
        """Return the comparison on which the arithmetic is judged, which was chosen before."""
        assert self._base is not None
        return self._base

    def choose_base(self) -> None:
        """Choose the comparison on which the arithmetic is judged, once.

        The runs as they came; where rows or initial weights differ, against the reference replayed from the topology's weights
        and rows. Causes that are found put it in its place with them switched off (`rebase`).
        """
        if self._base is not None:
            return
        self._base = self.compare()
        ledger = self.ledger
        if ledger is not None and ledger.by:
            self.notes.append(_BY_SOME_INPUTS.format(_inputs(ledger.by)))
        if ledger is not None and ledger.dropped:
            self.notes.append(_DROPPED.format(ledger.dropped))
        starts_elsewhere = any(point.measure.key.kind == "initial-weight" for point in self.comparison.exceeding)
        if self.reference.follows:  # each step began with this run's weights
            if starts_elsewhere or self.reference.has_other_examples:
                what = "initial weights" if starts_elsewhere else "examples"
                self.notes.append(told("on-its-own")(f"the {what} differ from those of one device: {_ON_ITS_OWN}"))
            return
        if starts_elsewhere:
            self._replay(0, "the initial weights differ from those of one device")
        elif ledger is not None and ledger.grows and self.plain is self.reference:
            self._replay(0, "the batch grows with the number of replicas")
        elif ledger is not None and ledger.first_apart is not None and ledger.first_apart < ledger.num_steps:
            self._replay(ledger.first_apart, "the examples differ from those of one device")
        elif not self.lab.permutes and ledger is not None and not is_in_order(ledger) and not self.comparison.is_equivalent:
            self._replay(0, "the order of the examples matters, and differs here")

    def _replay(self, step: int, why: str) -> None:
        """Judge against the reference replayed from the topology's weights and rows, else only what comes before."""
        again = self.switch("replay")
        if again is not None and again.points and again.first_step("initial-weight") is None:
            self._base, self._kept = again, ("replay",)
            self.notes.append(told("on-its-own")(f"{why}: {_ON_ITS_OWN}"))
        else:
            self.cut(step, why)

    def rebase(self, comparison: Comparison, switch: str | None = None, *notes: Told) -> None:
        """Judge the arithmetic on this comparison from now on; what is switched off for it stays so in what is run again."""
        self._base, self._explanation = comparison, None
        self.notes += notes
        if switch is not None:
            self._kept = (*self._kept, switch)
        self._explained.clear()

    def without(self, switch: str) -> bool:
        """Return whether the arithmetic is judged with this suspect switched off."""
        return switch in self._kept

    def explain_gradients(self) -> Explanation:
        """Explain the base's gradients by models; where none fits, also each replica's loss alone on one device."""
        if self._explanation is None:
            found = explain(self.base)
            first = self.base.first_step("gradient")
            is_open = self.facts.joins_gradients and any(step == first for _, step in found.unexplained)
            self._explanation = self._explained_by_loss(found) if is_open else found
        return self._explanation

    def _explained_by_loss(self, found: Explanation) -> Explanation:
        """Explain gradients that pass from one replica to another, as those of synchronized normalization do.

        A replica's local gradient is not that of its own loss then. One device can take each replica's loss alone.
        """
        again = self.switch(BY_LOSS, alone=True)
        if again is None or not explains_up_to(again, found.unexplained[0][1], self.base):
            return found
        noisy = self.base.with_noise_of(again)  # a loss alone is a difference of gradients, which rounds more
        return explain(replace(noisy, runs=replace(noisy.runs, topology=again.runs.reference)))

    def find_first_unexplained(self) -> int | None:
        """Return the first step whose gradients differ, if no model of them explains it."""
        first = self.base.first_step("gradient")
        return first if any(step == first for _, step in self.explain_gradients().unexplained) else None

    def losses_agree(self, steps: Collection[int]) -> bool:
        """Return whether the replicas' losses, of which gradients are taken, add up to that of one device in these steps."""
        losses = [point for point in self.base.objectives if point.step in steps]
        return bool(losses) and not any(point.exceeds for point in losses)

    def are_counts(self, fit: Fit) -> bool:
        """Return whether the replicas' weights in a fit are parts of one count, within this program's rounding."""
        return fit.are_counts(in_16_bits=bool(self.facts.casts))

    def switch(self, switch: str, *, alone: bool = False) -> Comparison | None:
        """Let the lab run both sides again with one more suspect switched off.

        Args:
            switch: The suspect, or what the reference is run on.
            alone: Without what is switched off already.

        Returns:
            The comparison of both sides; None where it could not be run.
        """
        asked = (switch,) if alone else (*self._kept, switch)
        if asked not in self._switched:
            self._switched[asked] = self.lab.compare_switched(self.pair, asked)
        return self._switched[asked]

    @property
    def joins(self) -> Joins | None:
        """Return what must see the whole batch in the first step that no simple model of its gradients explains.

        None where there is no such step, or experiments have no answer. Causes share the answer: it is asked for once, and
        again where something is switched off in both runs.
        """
        kept = tuple(switch for switch in self._kept if switch not in (BY_SHARE, "replay"))
        if kept not in self._joins:
            self._joins[kept] = self._find_joins(kept)
        return self._joins[kept]

    def _find_joins(self, kept: Sequence[str]) -> Joins | None:
        explanation, first = self.explain_gradients(), self.base.first_step("gradient")
        if first is None or self.num_replicas < 2 or self.clips_out_of_sight:
            return None
        counted = {fit.optimizer for fit in explanation.weighted if fit.step == first and self.are_counts(fit)}
        weighted = [(fit.optimizer, fit.step) for fit in explanation.weighted]
        is_clear = len(located(operations("loss", "count", "mean", "ratio").find(self.lines))) == 1
        layers = {tensor.split("/")[-2] for tensor in self.facts.batchnorm if "/" in tensor}
        for name, step in (*explanation.unexplained, *weighted):
            if step == first:
                # Where a count for each replica explains the gradients already, experiments may cost a start to say whose.
                may_start = name not in counted or not is_clear
                found = self.lab.find_joins(self.pair, kept, name, first, may_start=may_start)
                own = None if found is None else found.without(layers)
                is_of_own_loss = (name, step) in weighted and not self.lines.rows_meet
                if own is not None and own.tells and not (is_of_own_loss and own.is_of_one_sum):
                    return own
        return None

    @property
    def clips_out_of_sight(self) -> bool:
        """Return whether the program clips what its tapes give by itself, and only what it makes of that is known."""
        clips = bool(self.facts.clipped_by) and not self.without("no-clipping")
        steps = (step for name in self.topology.optimizers for step in complete(self.topology, name)[:1])
        return clips and not any(local.taped for step in steps for local in step.values())

    @property
    def state(self) -> tuple[int, int]:
        """Return what tells whether others see something new: which base there is, and how many differences are left."""
        return id(self._base), 0 if self._base is None else len(self.left())

    def left(self) -> list[Point]:
        """Return the differences of the base that neither the arithmetic nor its consequences explain."""
        predicates = [*self._explained, *self._explained_always]
        return [point for point in self.base.exceeding if not any(predicate(point) for predicate in predicates)]

    def explain(self, predicate: Callable[[Point], bool], *, always: bool = False) -> None:
        """Note that a cause explains these differences; always: also where the base changes later."""
        (self._explained_always if always else self._explained).append(predicate)

    def explain_start(self) -> None:
        """Note that a cause explains other initial weights."""
        self.explain(lambda point: point.measure.key.kind == "initial-weight", always=True)

    def explain_aside(self, predicate: Callable[[Point], bool], *notes: Told) -> None:
        """Note that a cause explains these differences, which do not start the divergence: advice, or a consequence."""
        self.explain(predicate)
        self._aside.append(predicate)
        self.notes += notes

    @property
    def first_deciding(self) -> Difference | None:
        """Return the first divergence of the original runs that no cause has set aside."""
        points = self.comparison.exceeding
        deciding = (point.difference() for point in points if not any(predicate(point) for predicate in self._aside))
        return next(deciding, None)

    def explain_fits(self, fits: Sequence[Fit], reports: Callable[[Point], bool] = lambda point: True) -> None:
        """Mark wrong gradients as explained, later weights too, and everything once each run has its own weights.

        Args:
            fits: The steps that a model explains.
            reports: Which losses and metrics of steps with the reference's weights are explained too.
        """
        steps = {(fit.optimizer, fit.step) for fit in fits}
        onset = min(fit.step for fit in fits)
        apart = self.base.weights_apart

        def is_explained(point: Point) -> bool:
            key, step = point.measure.key, point.step
            if key.kind in ("weight", "variable") or (apart is not None and step > apart >= onset):
                return step >= onset
            return (key.optimizer, step) in steps if key.kind == "gradient" else step >= onset and reports(point)

        self.explain(is_explained)

    def explain_update(self, step: int) -> None:
        """Mark the weights as explained from a wrong update on, and what follows from them where each run has its own."""
        follows = self.base.runs.reference.follows

        def is_explained(point: Point) -> bool:
            is_of_update = point.measure.key.kind in ("weight", "variable", "final-weight")
            # What is averaged over an epoch is reported by a run that makes the updates itself.
            return point.step >= step and (is_of_update or point.is_late or (point.step > step and not follows))

        if any(point.is_late and is_explained(point) for point in self.base.exceeding):
            self.unreachable.append(told(LATER)(f"what is reported over several steps, from step {step} on: {_UPDATED}"))
        self.explain(is_explained)

    def cut(self, step: int, why: str, *, at: Sequence[str] = ()) -> None:
        """Leave out everything from a step on (in the step itself all but the kinds `at`): it cannot be compared."""
        self.unreachable.append(told(LATER)(f"gradients, weights and losses from step {step} on: {why}"))
        self.choose_base()
        self.rebase(self.base.before(step, at))

    @property
    def has_ended_early(self) -> bool:
        """Return whether the program raised or hung."""
        return bool(self.outcome.failure or self.outcome.hung)

    def withdraw(self, code: str) -> None:
        """Take back a cause that was found: another one explains what it saw."""
        self.found = [finding for finding in self.found if finding.code != code]

    def has(self, code: str) -> bool:
        """Return whether a cause was already found."""
        return any(finding.code == code for finding in self.found)
