"""Choose a verification's runs, and how each topology's is compared. `lab.py` says what is asked in which order, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from emulate.errors import UsageError
from emulate.evaluate import is_eager, refusal
from emulate.recorder import IN_32_BITS
from emulate.told import Told, told
from emulate.topology import Topology
from emulate.trace import Facts, Trace
from emulate.verify.case import Case
from emulate.verify.causes.replicas import REPLICAS_MISSING
from emulate.verify.certify import Evidence
from emulate.verify.compared_runs import Rounding
from emulate.verify.ends import judge_ends, outcome_of, unjudged, unseen_code, with_faults
from emulate.verify.judge import Judgement, judge
from emulate.verify.lab import Lab
from emulate.verify.ledgers import hosts_of_rows, is_wide, ledgers, order_widens
from emulate.verify.recorded import NOISE_RUNS, ORDER_RUNS, Recorded, RunPair, same_weights, trained_otherwise
from emulate.verify.recovery import Recovery
from emulate.verify.references import (
    better_judgement,
    explaining_a_larger_batch,
    follow,
    grouping_matters,
    lead,
    led_by_share,
    note_of_more_examples,
    shares_of_batchnorm,
)
from emulate.verify.result import Met, RunResult, trace_of
from emulate.verify.run_spec import AS_IT_STANDS, OWN_DRAWS, Variation
from emulate.verify.verdict import BY_DESIGN, Reference, Run

_ORDER = told("order-matters")(
    "The training depends on the order of the examples in a batch. The noise floor comes from runs on one "
    "device with rounding errors alone, with the examples in order, and may be too low."
)
_NOT_IN_16_BITS = told("not-in-16-bits")(
    "16 bits: with its layers in 32 bits the program differs by design. Allow these causes with --allow, and gpudist also "
    "compares the program as it is."
)
_AT_ONCE = told("ended-early")(
    "everything else: the verification ended early, because not all devices train (replicas-missing). Fix that first, then "
    "verify again."
)
_AS_IT_IS = told("not-in-32-bits")(
    "The program computes in {} and does not run with its layers in 32 bits. gpudist compares it as it is."
)
_IN_32_BITS = told("compared-in-32-bits")(
    "The program computes in {}. gpudist compares runs with its layers in 32 bits, where rounding errors hide less; if they "
    "agree, it also compares the program as it is."
)
_BOUNDED = told("stopped-looking")(
    "gpudist has stopped looking for causes: {} were made. There may be another cause, or one that has a simpler reason. "
    "`--thorough` looks on without a limit."
)
_NO_FAULTS = told("without-faults")("gpudist did not run it with its faults, because without them it does not reach its end.")
_RUNS_WITH_XLA = told("runs-with-xla")("gpudist ran the program once more as it is written, with XLA: it does not fail.")


@dataclass(frozen=True)
class _Seen:
    """Hold the runs that one topology is judged by.

    Attributes:
        run: As the program stands.
        reference: On one device, as it stands.
        own: With the draws that replicas make by themselves, where these show more.
        varied: In the variation that is compared, where that is another one.
        compared: The trace that is compared.
        recovery: With the faults that were asked for.
    """

    run: RunResult
    reference: RunResult
    own: RunResult
    varied: RunResult | None
    compared: Trace
    recovery: Recovery | None


class Session:
    """Choose the runs of one verification, and judge each topology.

    The first topology and the reference start together. What steps draw at random follows the rows in all runs; where that may
    hide something, the topology is run with the program's own draws, too.

    Args:
        lab: Makes the runs.
        program: The program's name, for messages.
        allow: Codes of causes that do not decide.
    """

    def __init__(self, lab: Lab, program: str, allow: Collection[str]) -> None:
        self._lab = lab
        self._program = program
        self._allow = allow
        self._leads: dict[tuple[str, Variation], Variation | None] = {}
        self._cases: dict[Topology, Callable[[], Case | None]] = {}

    def judge(self, topologies: Sequence[Topology]) -> tuple[Reference, list[Run], list[Told]]:
        """Make the runs and judge each topology.

        Args:
            topologies: At least one.

        Returns:
            What the reference did, the verdict on each topology, and what holds for all of them.

        Raises:
            UsageError: When the program ends well and never trains.
        """
        lab = self._lab
        lab.plan(len(topologies))
        first = lab.start_topology(topologies[0])
        reference = lab.run_reference()
        if reference.status != "ok":
            runs = [first, *map(lab.start_topology, topologies[1:])]
            judged, reasons = judge_ends(lab, self._allow, reference, [run.result() for run in runs])
            return self._summary(reference), judged, reasons
        assert reference.trace is not None
        compiled = lab.start_otherwise("compiled") if is_eager(reference.trace) else None
        if normalized := shares_of_batchnorm(reference.trace, topologies[0]):
            lab.start_reference(normalized)  # it is asked for in any case, while the topology still runs
        self._check_that_it_trains(reference, first.result())
        runs = [first]
        if self._lacks_replicas(first.result(), reference):
            runs += map(lab.start_topology, topologies[1:])
            if all(self._lacks_replicas(run.result(), reference) for run in runs):
                judged = [self._judge_at_once(run.result(), reference) for run in runs]
                return self._summary(reference), judged, unseen_code(reference)
        reference = self._with_rows(self._compiled(reference, compiled), first.result())
        assert reference.trace is not None
        facts = Facts.of(reference.trace)
        # A coordinator may apply workers' results without waiting for all that it has scheduled.
        if facts.asynchronous and reference.trace.applies_sums:
            runs += map(lab.start_topology, topologies[len(runs) :])
            return self._summary(reference), [self._without_order(run.result()) for run in runs], unseen_code(reference)
        lab.rounding = Rounding.of(reference.trace)
        lab.apply_only, lab.taping = tuple(facts.apply_only), tuple(facts.taping)
        if facts.drawn:
            lab.take_drawn(facts.drawn)
            runs = [lab.start_topology(topologies[0])]
        notes = unseen_code(reference)
        bases = self._bases(reference, notes)
        # One device at the run's weights and its noise, else noise of its own; both again where replicas normalize.
        of_topologies = len(topologies) * len(bases) - len(runs) + bool(facts.drawn)
        lab.expect(of_topologies + 3 + 3 * bool(facts.batchnorm))
        runs += map(lab.start_topology, topologies[len(runs) :])
        compared = [
            {base: lab.start_topology(topology, base) if base != AS_IT_STANDS else None for base in bases}
            for topology in topologies
        ]
        if self._order_matters(bases[0], runs[0].result(), compared[0][bases[0]]):
            lab.permutes = False
            notes.append(_ORDER)
        judged = [self._judge_one(run.result(), varied, reference, facts) for run, varied in zip(runs, compared, strict=True)]
        return self._summary(reference), judged, notes

    def evidence(self, topology: Topology) -> Evidence | None:
        """Return what a topology was judged by, with the draws that the program makes without gpudist; None without it."""
        case = self._cases[topology]() if topology in self._cases else None
        if case is None or not _draws_numbers(case.untouched):
            return None if case is None else Evidence(case, case.untouched)
        own = trace_of(self._lab.run_topology(topology, OWN_DRAWS))
        return None if own is None else Evidence(case, own)

    def _at_once(self, run: RunResult, reference: RunResult) -> Case:
        """Return what is known of a run without any other run than the reference."""
        assert reference.trace is not None
        trace = run.trace or self._lab.empty_trace(run)
        return Case(RunPair(reference.trace, trace), Recorded(), outcome=outcome_of(run, reference))

    def _lacks_replicas(self, run: RunResult, reference: RunResult) -> bool:
        """Return whether it is known already, and decides, that devices of a topology do not train."""
        is_expected = REPLICAS_MISSING.code in self._allow
        is_early = run.status == "ok" and not (self._lab.settings.faults or run.met.paths or is_expected)
        return is_early and REPLICAS_MISSING.search(self._at_once(run, reference)) is not None

    def _judge_at_once(self, run: RunResult, reference: RunResult) -> Run:
        """Judge a topology whose devices do not all train: what else differs is only known once they do."""
        judgement = judge(self._at_once(run, reference), self._allow, only=REPLICAS_MISSING)
        not_compared = (*judgement.not_compared, _AT_ONCE)
        judgement = replace(judgement, worst=None, first_divergence=None, course=(), not_compared=not_compared)
        return judgement.fill(unjudged(run, reference))

    def _compiled(self, own: RunResult, compiled: Future[RunResult] | None) -> RunResult:
        """Return the reference with compiled steps, which can be evaluated, where these train as its eager ones do."""
        if compiled is None:
            return own
        again = trace_of(compiled.result())
        if own.trace is not None and again is not None and not refusal(again) and not trained_otherwise(own.trace, again):
            return compiled.result()
        return self._lab.take_back()

    def _with_rows(self, reference: RunResult, run: RunResult) -> RunResult:
        """Return the reference, run again if its examples were not seen because only the topology calls `Strategy.run`."""
        if run.trace is None or reference.trace is None or _rows(reference.trace) or not _rows(run.trace):
            return reference
        again = self._lab.start_otherwise("by its functions").result()
        if again.status == "ok" and again.trace is not None and _rows(again.trace) & _rows(run.trace):
            return again
        return self._lab.take_back()

    def _order_matters(self, base: Variation, run: RunResult, varied: Future[RunResult] | None) -> bool:
        """Return whether permuted examples are another training: by themselves, or because only their noise is wide."""
        trace = (trace_of(varied.result()) if varied is not None else None) or run.trace
        led = self._led(run, trace, base) if trace is not None else None
        pair = self._lab.pair(led or base, trace or self._lab.empty_trace(run))
        if pair is None:
            return False
        # All runs must show it, so that the first one, which is made in any case, often answers for all.
        for permuted, in_order in ((1, 1), (NOISE_RUNS, ORDER_RUNS)):
            noise = self._lab.measure_noise(pair, permuted)
            if not is_wide(pair.reference, noise):
                return False
            self._lab.expect(0)
            if not order_widens(pair.reference, noise, self._lab.run_in_order(pair, in_order)):
                return False
        return True

    def _bases(self, reference: RunResult, notes: list[Told]) -> list[Variation]:
        """Return what is compared: the program as it stands; of a 16-bit program first its layers in 32 bits."""
        assert reference.trace is not None
        facts = Facts.of(reference.trace)
        short = [name for name in ("bfloat16", "float16") if getattr(facts, name)]
        if not short:
            return [AS_IT_STANDS]
        wide = AS_IT_STANDS.without(IN_32_BITS)
        in_32_bits = trace_of(self._lab.run_reference(wide))
        if in_32_bits is None:
            notes.append(_AS_IT_IS.format(short[0]))
            return [AS_IT_STANDS]
        self._lab.rounding_in_32_bits = Rounding.of(in_32_bits)  # what the program casts by itself stays as it is
        notes.append(_IN_32_BITS.format(short[0]))
        return [wide, AS_IT_STANDS]

    def _check_that_it_trains(self, reference: RunResult, run: RunResult) -> None:
        traces = [result.trace for result in (reference, run) if result.trace is not None]
        if run.status == "ok" and not any(trace.num_steps for trace in traces) and not Facts.of(*traces).broken:
            raise UsageError(
                "A program to verify must train: make steps with an optimizer, or with a gradient tape of tf.Variables "
                f"inside Strategy.run. Received: program={self._program!r}, which ended without a step. Is the training "
                "behind a condition or an argument, or in another process that the program starts? Pass arguments after "
                "`--`, in Python as `args`."
            )

    def _judge_one(
        self, run: RunResult, varied: Mapping[Variation, Future[RunResult] | None], reference: RunResult, facts: Facts
    ) -> Run:
        if self._lacks_replicas(run, reference):
            return self._judge_at_once(run, reference)
        self._lab.expect(0)
        if run.status == "ok" and run.xla:
            self._run_as_written(run)
        own = self._with_own_draws(run, facts)
        as_it_is = _Seen(run, reference, own, None, run.trace or self._lab.empty_trace(run), self._recovery(own))
        judgements: list[Judgement] = []
        for base, of_base in varied.items():
            result = None if of_base is None else of_base.result()
            if IN_32_BITS in base.switches and trace_of(result) is None:
                continue  # it failed, as the program does or because it is in 32 bits
            compared = (run.trace and trace_of(result)) or as_it_is.compared
            judgements.append(self._judged(replace(as_it_is, varied=result, compared=compared), base))
            if judgements[-1].verdict != "equivalent":
                break
        judgement = judgements[0]
        self._cases[run.topology] = lambda: judgements[-1].case
        if judgement.verdict == BY_DESIGN and IN_32_BITS in base.switches:
            judgement = replace(judgement, not_compared=(*judgement.not_compared, _NOT_IN_16_BITS))
            self._cases[run.topology] = lambda: self._case(as_it_is, AS_IT_STANDS)
        if judgements[1:] and judgements[-1].skipped:
            judgement = judgement.in_16_bits(judgements[-1])
        elif judgements[1:] and judgements[-1].verdict != "equivalent":
            judgement = judgements[-1].of_16_bits()
        if self._lab.is_bounded:
            self._lab.is_bounded = False
            judgement = replace(judgement, notes=(*judgement.notes, _BOUNDED.format(self._lab.price)))
        judged = judgement.fill(unjudged(run, reference))
        return judged if as_it_is.recovery is None else with_faults(judged, as_it_is.recovery)

    def _judged(self, seen: _Seen, base: Variation) -> Judgement:
        """Judge a topology's run beside the reference, both in a variation.

        Asked in the order of the price: first the reference at the run's weights and on its examples, which is evaluated. Then
        the reference as it came, or on the examples of a larger batch; of those a second one where the first leaves the cause
        or the scale open. Last the reference in lockstep with the run, where rounding may be what differs.
        """
        run, reference, compared = seen.run, seen.reference.trace, seen.compared
        assert reference is not None
        asynchronous = Facts.of(reference, compared).asynchronous
        growth = max((ledger.growth for ledger in ledgers(reference, compared).values()), default=1)
        bases = [base]
        if run.status == "ok" and growth > 1:
            bases = explaining_a_larger_batch(self._lab, run, base, compared, growth)
            run.notes += filter(None, [note_of_more_examples(reference, compared)])

        def judged_on(base: Variation) -> Judgement:
            return judge(self._case(seen, base), self._allow, grows=growth > 1, asynchronous=asynchronous)

        led = self._led(run, compared, base)
        if led is not None:
            judgement = judged_on(led)
            if judgement.is_well or not judgement.has_unexplained:
                return judgement
        judgement, decides = judged_on(bases[0]), bases[0]
        if len(bases) > 1 and (judgement.is_unexplained or judgement.leaves_the_scale_open):
            on_shares = judged_on(bases[1]).advised_by(judgement)
            if judgement.is_unexplained or on_shares.is_scaled:
                judgement, decides = on_shares, bases[1]
        # A second look may tell more where a cause is unknown, or where amplified rounding hides gradients.
        is_open = judgement.is_unexplained or (judgement.is_well and judgement.is_amplified)
        followed = follow(reference, compared) if run.status == "ok" and is_open else None
        if followed is not None and (at_its_weights := replace(decides, follow=followed)) != led:
            judgement = better_judgement(judgement, judged_on(at_its_weights))
        failed = self._lab.take_first_failure()
        if judgement.is_unexplained and failed:
            note = told("further-runs-failed")(f"Further runs failed, which could have shown more. The first was {failed}")
            judgement = replace(judgement, notes=(*judgement.notes, note))
        return judgement

    def _case(self, seen: _Seen, base: Variation) -> Case:
        """Return what is known of a topology's run beside a variation of the reference."""
        lab, compared, own = self._lab, seen.compared, seen.reference.trace
        plain = base.as_it_normalizes
        beside = base if compared.num_steps else None
        if plain != base:  # what differs in any case needs no noise: each step is compared once it is normalized alike
            base, beside = plain, plain.source
        elif beside is not None:
            lab.pair(base, compared)
        first = None if beside is None else trace_of(lab.run_reference(beside))
        others = [] if beside is None else lab.results_beside(beside)
        has_noise = first is not None and beside is not None and lab.is_noise_started(beside)
        first = first or own
        assert own is not None
        assert first is not None
        source = trace_of(lab.run_reference(base.source)) if base.follow is not None else None
        pair = RunPair(first, compared, base, beside if has_noise else None, source if first.follows else None, run=seen.run)
        varied = [] if seen.varied is None else [seen.varied]
        return Case(
            pair,
            lab,
            plain=own,
            same_seed=lab.same_seed(),
            untouched=seen.own.trace,
            outcome=outcome_of(seen.run, seen.reference),
            recovery=seen.recovery,
            is_of_groups=base.replay is not None and base.replay.summed and grouping_matters(lab, base, compared),
            met_alone=[result.met for result in (seen.reference, *others)],
            met=Met.together(result.met for result in (seen.reference, *others, seen.run, *varied)),
        )

    def _led(self, run: RunResult, compared: Trace, base: Variation) -> Variation | None:
        """Return the reference that has in each step the weights and the examples of a run; None where there is none.

        Args:
            run: How the topology's run went.
            compared: Its trace.
            base: The variation that is compared.

        Returns:
            Its variation.
        """
        key = (run.label, base)
        if key not in self._leads:
            plain, own = (trace_of(self._lab.run_reference(variation)) for variation in (AS_IT_STANDS, base))
            if run.status != "ok" or plain is None or own is None or (leads := lead(own, compared, plain)) is None:
                self._leads[key] = None
            else:
                led = replace(base, follow=leads[0], replay=leads[1])
                normalized = led_by_share(self._lab, led, own, compared)
                self._leads[key] = normalized or (led if self._lab.evaluate(led) else None)
        return self._leads[key]

    def _with_own_draws(self, run: RunResult, facts: Facts) -> RunResult:
        """Return the topology's run with the draws that replicas make by themselves, where they show what others may hide."""
        may_hide = facts.own_draws or self._lab.settings.faults  # a generator that starts again draws anew
        if run.status != "ok" or run.trace is None or not (may_hide and _draws_numbers(run.trace)):
            return run
        own = self._lab.run_topology(run.topology, OWN_DRAWS)
        return own if own.status == "ok" else run

    def _recovery(self, run: RunResult) -> Recovery | None:
        """Run again with the requested faults; None for a program that already failed without them."""
        if not self._lab.settings.faults:
            return None
        if run.status != "ok" or run.trace is None:
            run.notes.append(_NO_FAULTS)
            return None
        return Recovery(self._lab.run_with_faults(run.topology), run.trace)

    def _run_as_written(self, run: RunResult) -> None:
        """Check whether a program whose XLA-compiled step was recorded without XLA also runs with it."""
        written = self._lab.run_as_written(run.topology, 3 * run.seconds)
        if written.status == "ok":
            run.notes.append(_RUNS_WITH_XLA)
            return
        run.notes.append(told("fails-with-xla")("It was recorded without XLA. As it is written, with XLA, it fails here."))
        run.status, run.reason, run.failure, run.trace = written.status, written.reason, written.failure, None

    def _without_order(self, run: RunResult) -> Run:
        """Return the run of a coordinator that applies results as they arrive: which examples make a step is left to chance."""
        nothing = self._lab.empty_trace(run)
        outcome = replace(outcome_of(run, run), reference_failure=None)
        case = Case(RunPair(nothing, nothing), Recorded(), outcome=outcome)
        return judge(case, self._allow, asynchronous=True).fill(unjudged(run, run))

    def _summary(self, reference: RunResult) -> Reference:
        place = str(self._lab.place)
        if reference.status != "ok" or reference.trace is None:
            return Reference(reference.status, 0, True, reference.failure, place)
        again = self._lab.repeated()
        repeatable = again is None or same_weights(reference.trace, again)
        return Reference("ok" if reference.trace.num_steps else "none", reference.trace.num_steps, repeatable, topology=place)


def _rows(trace: Trace) -> set[str]:
    """Return the examples that were seen in its steps."""
    return {row for name in trace.optimizers for row in hosts_of_rows(trace, name)}


def _draws_numbers(trace: Trace) -> bool:
    """Return whether the program draws random numbers inside its steps."""
    return any(step.draws for name in trace.optimizers for replicas in trace.steps(name) for step in replicas.values())
