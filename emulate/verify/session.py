"""Manage a verification's runs: which are made, in which order, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from emulate.errors import UsageError
from emulate.evaluate import is_eager, refusal
from emulate.recorder import IN_32_BITS
from emulate.told import Told, told
from emulate.topology import REFERENCE, Topology
from emulate.trace import Facts, Trace
from emulate.verify import fallbacks
from emulate.verify.case import Case
from emulate.verify.causes.replicas import REPLICAS_MISSING
from emulate.verify.certify import Evidence
from emulate.verify.compared_runs import Rounding
from emulate.verify.fallbacks import explaining_a_larger_batch, grouping_matters, judge_ends, note_of_more_examples
from emulate.verify.judge import Judgement, judge
from emulate.verify.ledgers import COARSE, hosts_of_rows, is_wide, ledgers, order_widens
from emulate.verify.recovery import Recovery
from emulate.verify.repeats import does_the_same
from emulate.verify.reruns import Reruns
from emulate.verify.result import Met, RunResult
from emulate.verify.run_summary import outcome_of, same_weights, unjudged, unseen_code, with_faults
from emulate.verify.runner import Runner
from emulate.verify.verdict import BY_DESIGN, Reference, Run
from emulate.verify.yardstick import Variation, Yardstick, Yardsticks, trace_of

OTHER_RUNS = 2
"""The reference and its first noise run: as many as a program needs that trains the same model."""
AS_IT_STANDS, OWN_DRAWS = Variation(), Variation(own_draws=True)
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
_NO_FAULTS = told("without-faults")("gpudist did not run it with its faults, because without them it does not reach its end.")
_RUNS_WITH_XLA = told("runs-with-xla")("gpudist ran the program once more as it is written, with XLA: it does not fail.")


class Session:
    """Make the runs of one verification, and judge each topology.

    The first topology and the reference start together. What steps draw at random follows the rows in all runs; where that may
    hide something, the topology is run with the program's own draws, too.

    Args:
        runner: Makes the runs.
        program: The program's name, for messages.
        seed: The seed of the verification.
        allow: Codes of causes that do not decide.
        reference: Where the reference runs.
    """

    def __init__(
        self, runner: Runner, program: str, seed: int, allow: Collection[str], reference: Topology = REFERENCE
    ) -> None:
        self._runner = runner
        self._program = program
        self._allow = allow
        self._reference = reference
        self._yardsticks = Yardsticks(runner, seed, reference)
        self._reruns = Reruns(self._yardsticks, runner.program)
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
        self._runner.limit.num_runs = len(topologies) + OTHER_RUNS
        first = self._yardsticks.topology(topologies[0], AS_IT_STANDS)
        yardstick = self._yardsticks.reference(AS_IT_STANDS)
        reference = yardstick.reference.result()
        if reference.status != "ok":
            runs = [first, *(self._yardsticks.topology(topology, AS_IT_STANDS) for topology in topologies[1:])]
            judged, reasons = judge_ends(self._runner, self._allow, reference, [run.result() for run in runs])
            return self._summary(reference), judged, reasons
        assert reference.trace is not None
        compiled = self._yardsticks.by_compiled_steps() if is_eager(reference.trace) else None
        self._reruns.foresee_batchnorm(reference, topologies[0])
        self._check_that_it_trains(reference, first.result())
        runs = [first]
        if self._lacks_replicas(first.result(), reference):
            runs += [self._yardsticks.topology(topology, AS_IT_STANDS) for topology in topologies[1:]]
            if all(self._lacks_replicas(run.result(), reference) for run in runs):
                judged = [self._judge_at_once(run.result(), reference) for run in runs]
                return self._summary(reference), judged, unseen_code(reference)
        reference = self._with_rows(self._compiled(yardstick, compiled), first.result())
        assert reference.trace is not None
        # A coordinator may apply workers' results without waiting for all that it has scheduled.
        if Facts.of(reference.trace).asynchronous and reference.trace.applies_sums:
            runs += [self._yardsticks.topology(topology, AS_IT_STANDS) for topology in topologies[len(runs) :]]
            return self._summary(reference), [self._without_order(run.result()) for run in runs], unseen_code(reference)
        self._yardsticks.rounding = Rounding.of(reference.trace)
        facts = Facts.of(reference.trace)
        self._yardsticks.apply_only, self._yardsticks.taping = tuple(facts.apply_only), tuple(facts.taping)
        if facts.drawn:
            self._yardsticks.take_drawn(facts.drawn)
            runs = [self._yardsticks.topology(topologies[0], AS_IT_STANDS)]
        notes = unseen_code(reference)
        bases = self._bases(reference, notes)
        # One device at the run's weights and its noise, else noise of its own; both again where replicas normalize.
        of_topologies = len(topologies) * len(bases) - len(runs) + bool(facts.drawn)
        self._runner.expect(of_topologies + 3 + 3 * bool(facts.batchnorm))
        runs += [self._yardsticks.topology(topology, AS_IT_STANDS) for topology in topologies[len(runs) :]]
        compared = [[self._compared(topology, base) for base in bases] for topology in topologies]
        if self._order_matters(bases[0], runs[0].result(), compared[0][0]):
            self._yardsticks.leave_rows_in_order()
            notes.append(_ORDER)
        judged = [
            self._judge_one(run.result(), dict(zip(bases, comparisons, strict=True)), reference, facts)
            for run, comparisons in zip(runs, compared, strict=True)
        ]
        return self._summary(reference), judged, notes

    def evidence(self, topology: Topology) -> Evidence | None:
        """Return what a topology was judged by, with the draws that the program makes without gpudist; None without it."""
        case = self._cases[topology]() if topology in self._cases else None
        if case is None or not _draws_numbers(case.untouched):
            return None if case is None else Evidence(case, case.untouched)
        own = trace_of(self._yardsticks.topology(topology, OWN_DRAWS))
        return None if own is None else Evidence(case, own)

    def _at_once(self, run: RunResult, reference: RunResult) -> Case:
        """Return what is known of a run without any other run than the reference."""
        assert reference.trace is not None
        trace = run.trace or self._runner.empty_trace(run)
        return Case(reference.trace, trace, untouched=trace, outcome=outcome_of(run, reference))

    def _lacks_replicas(self, run: RunResult, reference: RunResult) -> bool:
        """Return whether it is known already, and decides, that devices of a topology do not train."""
        is_early = run.status == "ok" and not (self._runner.faults or run.met.paths or REPLICAS_MISSING.code in self._allow)
        return is_early and REPLICAS_MISSING.look(self._at_once(run, reference)) is not None

    def _judge_at_once(self, run: RunResult, reference: RunResult) -> Run:
        """Judge a topology whose devices do not all train: what else differs is only known once they do."""
        judgement = judge(self._at_once(run, reference), self._allow, only=REPLICAS_MISSING)
        not_compared = (*judgement.not_compared, _AT_ONCE)
        judgement = replace(judgement, worst=None, first_divergence=None, course=(), not_compared=not_compared)
        return judgement.fill(unjudged(run, reference))

    def _compiled(self, yardstick: Yardstick, compiled: Future[RunResult] | None) -> RunResult:
        """Return the reference with compiled steps, which can be evaluated, where these train as its eager ones do."""
        own, again = trace_of(yardstick.reference), trace_of(compiled)
        if compiled is None or (own and again and not refusal(again) and does_the_same(own, again)):
            return (compiled or yardstick.reference).result()
        self._yardsticks.take_back_functions(yardstick)
        return yardstick.reference.result()

    def _with_rows(self, reference: RunResult, run: RunResult) -> RunResult:
        """Return the reference, run again if its examples were not seen because only the topology calls `Strategy.run`."""
        if run.trace is None or reference.trace is None or _rows(reference.trace) or not _rows(run.trace):
            return reference
        yardstick = self._yardsticks.reference(AS_IT_STANDS)
        again = self._yardsticks.by_functions().result()
        if again.status == "ok" and again.trace is not None and _rows(again.trace) & _rows(run.trace):
            return again
        self._yardsticks.take_back_functions(yardstick)
        return reference

    def _order_matters(self, base: Variation, run: RunResult, varied: Future[RunResult] | None) -> bool:
        """Return whether permuted examples are another training: by themselves, or because only their noise is wide."""
        trace = trace_of(varied) or run.trace
        led = self._led(run, trace, base) if trace is not None else None
        traces = self._yardsticks.with_noise(led or base).traces()
        if traces is None:
            return False
        reference, noise = traces
        in_order = self._yardsticks.rounded_in_order(led or base, COARSE)
        # All runs must show it, so that the first one, which is made in any case, often answers for all.
        for some in (slice(None, 1), slice(None)):
            permuted = noise[some]
            if not is_wide(reference, permuted):
                return False
            self._runner.expect(0)
            if not order_widens(reference, permuted, in_order[some]):
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
        in_32_bits = trace_of(self._yardsticks.reference(wide).reference)
        if in_32_bits is None:
            notes.append(_AS_IT_IS.format(short[0]))
            return [AS_IT_STANDS]
        self._yardsticks.rounding_in_32_bits = Rounding.of(in_32_bits)  # what the program casts by itself stays as it is
        notes.append(_IN_32_BITS.format(short[0]))
        return [wide, AS_IT_STANDS]

    def _compared(self, topology: Topology, base: Variation) -> Future[RunResult] | None:
        return self._yardsticks.topology(topology, base) if base != AS_IT_STANDS else None

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
        self, run: RunResult, runs: Mapping[Variation, Future[RunResult] | None], reference: RunResult, facts: Facts
    ) -> Run:
        if self._lacks_replicas(run, reference):
            return self._judge_at_once(run, reference)
        self._runner.expect(0)
        if run.status == "ok" and run.xla:
            self._run_as_written(run)
        own = self._with_own_draws(run, facts)
        recovery = self._recovery(own)
        judgements: list[Judgement] = []
        for base, varied in runs.items():
            if IN_32_BITS in base.switches and trace_of(varied) is None:
                continue  # it failed, as the program does or because it is in 32 bits
            judgements.append(self._judged(run, own, varied, base, reference, recovery))
            if judgements[-1].verdict != "equivalent":
                break
        judgement = judgements[0]
        self._cases[run.topology] = lambda: judgements[-1].case
        if judgement.verdict == BY_DESIGN and IN_32_BITS in base.switches:
            judgement = replace(judgement, not_compared=(*judgement.not_compared, _NOT_IN_16_BITS))
            as_it_is = run.trace or self._runner.empty_trace(run)
            self._cases[run.topology] = lambda: self._case(run, own, None, AS_IT_STANDS, reference, as_it_is, recovery)
        if judgements[1:] and judgements[-1].verdict != "equivalent":
            judgement = judgements[-1].of_16_bits()
        judged = judgement.fill(unjudged(run, reference))
        return judged if recovery is None else with_faults(judged, recovery)

    def _judged(
        self,
        run: RunResult,
        own: RunResult,
        varied: Future[RunResult] | None,
        base: Variation,
        reference: RunResult,
        recovery: Recovery | None,
    ) -> Judgement:
        """Judge a topology's run beside the reference, both in a variation."""
        assert reference.trace is not None
        compared = (run.trace and trace_of(varied)) or run.trace or self._runner.empty_trace(run)
        asynchronous = Facts.of(reference.trace, compared).asynchronous
        growth = max((ledger.growth for ledger in ledgers(reference.trace, compared).values()), default=1)
        bases = [base]
        if run.status == "ok" and growth > 1:
            bases = explaining_a_larger_batch(self._yardsticks, run, base, compared, growth)
            run.notes += filter(None, [note_of_more_examples(reference.trace, compared)])

        def judged_on(base: Variation) -> Judgement:
            case = self._case(run, own, varied, base, reference, compared, recovery)
            return judge(case, self._allow, grows=growth > 1, asynchronous=asynchronous)

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
        followed = (
            fallbacks.follow(reference.trace, compared) if run.status == "ok" and fallbacks.needs_lockstep(judgement) else None
        )
        at_its_weights = None if followed is None else replace(decides, follow=followed)
        if at_its_weights not in (None, led):
            judgement = fallbacks.better_judgement(judgement, judged_on(at_its_weights))
        failed = self._reruns.take_first_failure()
        if judgement.is_unexplained and failed:
            note = told("further-runs-failed")(f"Further runs failed, which could have shown more. The first was {failed}")
            judgement = replace(judgement, notes=(*judgement.notes, note))
        return judgement

    def _case(
        self,
        run: RunResult,
        own: RunResult,
        varied: Future[RunResult] | None,
        base: Variation,
        reference: RunResult,
        compared: Trace,
        recovery: Recovery | None,
    ) -> Case:
        """Return what is known of a topology's run beside a variation of the reference, and which runs may tell more."""
        yardsticks, reruns = self._yardsticks, self._reruns
        plain, yardstick = base.as_it_normalizes, None
        if plain != base:  # what differs in any case needs no noise: each step is compared once it is normalized alike
            base, yardstick = plain, yardsticks.reference(plain.source)
        elif compared.num_steps:
            yardstick = yardsticks.with_noise(base)
        first, noise = (yardstick.traces() if yardstick else None) or (reference.trace, ())
        others = yardstick.results() if yardstick else []
        has_hosts = run.topology.num_stepping_hosts > 1
        assert first is not None
        return Case(
            first,
            compared,
            noise,
            plain=reference.trace,
            source=trace_of(yardsticks.reference(base.source).reference) if base.follow is not None else None,
            same_seed=yardsticks.same_seed(),
            repeat=lambda: trace_of(yardsticks.again()),
            untouched=own.trace,
            rerun=lambda *asked: reruns.make(asked, run, compared, base),
            confirm=lambda: yardsticks.confirming(base, compared),
            reported=lambda: yardsticks.of_the_program(base),
            own_seeds=lambda: reruns.with_own_seeds(run, base),
            own_hashes=lambda: reruns.with_own_hashes(run, base),
            hash_places=reruns.hash_places if has_hosts else (),
            own_listing=lambda: reruns.with_own_listing(run, base),
            listing_places=reruns.listing_places if has_hosts else (),
            outcome=outcome_of(run, reference),
            recovery=recovery,
            order_matters=not yardsticks.permutes,
            is_of_groups=base.replay is not None and base.replay.summed and grouping_matters(yardsticks, base),
            met_alone=lambda: [result.met for result in (reference, yardsticks.again().result(), *others)],
            met=Met.together(result.met for result in (reference, *others, run, *([varied.result()] if varied else []))),
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
            plain, own = (trace_of(self._yardsticks.reference(variation).reference) for variation in (AS_IT_STANDS, base))
            leads = None
            if run.status == "ok" and plain is not None and own is not None:
                leads = fallbacks.lead(own, compared, plain)
            led = None if leads is None else replace(base, follow=leads[0], replay=leads[1])
            normalized = None if led is None or own is None else self._reruns.led_by_share(led, own, compared)
            self._leads[key] = normalized or (led if led is not None and self._yardsticks.led(led) else None)
        return self._leads[key]

    def _with_own_draws(self, run: RunResult, facts: Facts) -> RunResult:
        """Return the topology's run with the draws that replicas make by themselves, where they show what others may hide."""
        may_hide = facts.own_draws or self._runner.faults  # a generator that starts again draws anew
        if run.status != "ok" or run.trace is None or not (may_hide and _draws_numbers(run.trace)):
            return run
        own = self._yardsticks.topology(run.topology, OWN_DRAWS).result()
        return own if own.status == "ok" else run

    def _recovery(self, run: RunResult) -> Recovery | None:
        """Run again with the requested faults; None for a program that already failed without them."""
        if not self._runner.faults:
            return None
        if run.status != "ok" or run.trace is None:
            run.notes.append(_NO_FAULTS)
            return None
        plan = OWN_DRAWS.plan(self._yardsticks.seed)
        return Recovery(self._runner.start_with_faults(run.topology, plan).result(), run.trace)

    def _run_as_written(self, run: RunResult) -> None:
        """Check whether a program whose XLA-compiled step was recorded without XLA also runs with it."""
        written = self._runner.start_unprobed(f"{run.topology} as written", run.topology, 3 * run.seconds).result()
        if written.status == "ok":
            run.notes.append(_RUNS_WITH_XLA)
            return
        run.notes.append(told("fails-with-xla")("It was recorded without XLA. As it is written, with XLA, it fails here."))
        run.status, run.reason, run.failure, run.trace = written.status, written.reason, written.failure, None

    def _without_order(self, run: RunResult) -> Run:
        """Return the run of a coordinator that applies results as they arrive: which examples make a step is left to chance."""
        nothing = self._runner.empty_trace(run)
        outcome = replace(outcome_of(run, run), reference_failure=None)
        return judge(Case(nothing, nothing, outcome=outcome), self._allow, asynchronous=True).fill(unjudged(run, run))

    def _summary(self, reference: RunResult) -> Reference:
        place = str(self._reference)
        if reference.status != "ok" or reference.trace is None:
            return Reference(reference.status, 0, True, reference.failure, place)
        again = trace_of(self._yardsticks.repeat)
        repeatable = again is None or same_weights(reference.trace, again)
        return Reference("ok" if reference.trace.num_steps else "none", reference.trace.num_steps, repeatable, topology=place)


def _rows(trace: Trace) -> set[str]:
    """Return the examples that were seen in its steps."""
    return {row for name in trace.optimizers for row in hosts_of_rows(trace, name)}


def _draws_numbers(trace: Trace) -> bool:
    """Return whether the program draws random numbers inside its steps."""
    return any(step.draws for name in trace.optimizers for replicas in trace.steps(name) for step in replicas.values())
