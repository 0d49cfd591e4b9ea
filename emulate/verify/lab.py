"""Make and keep the runs of a verification, as the one door to them, and know what they have cost.

A start of the program costs seconds to minutes, an evaluation of functions that a run has kept a fraction of that, a comparison
of traces next to nothing. Everything else in this package is a function of traces and of what a lab gave. What is asked in what
order, and why:

1. The first topology and the reference start together: nothing can be told without both. An eager reference starts once more
   with its steps compiled, because only compiled steps can be evaluated. A reference that normalizes batches is evaluated with
   the statistics of shares while the topology still runs: that is asked for in any case.
2. A reference that makes its steps at the weights and on the examples of the run (`Variation.follow`, `replay`), with its first
   noise run. Only an evaluated one is taken (`evaluate`): each step is judged by itself then, and rounding does not pile up. A
   program that agrees with it needs nothing more: two starts and two evaluations.
3. More noise, where something differs. It makes the noise floor wider: what agrees beside one run agrees beside all. So the
   second and third run are made where the first leaves a difference, and runs that are rounded more coarsely where units on the
   other side of a kink, or gradients that cancel, may be all of it (`Recorded.compare`). Where reports of the program alone
   differ, the program is started: what it reports once in many steps no evaluated step shows.
4. Suspects switched off, one at a time, as causes ask (`compare_switched`). The topology runs again where the switch is one of
   both sides, one device where the switch may matter there. What replaces examples or gradients on one device alone is
   evaluated. A run that fails on the way says nothing; its error is told if no cause is found.
5. The reference once more, unchanged, where equal runs seem to differ or a difference has no cause. A noise run that begins as
   the reference does answers that question for nothing (`same_seed`).
6. The topology with hosts that are seeded, hash or list folders each in its own way, where the program depends on it.

What was tried and given up:
- All noise runs and the repeat for every program: they were three of its six starts, and told nothing of most.
- Noise runs of the program itself: each is a start, and in the first step they have the reference's weights to the bit, so that
  they show no rounding of the forward pass.
- BatchNormalization judged in up to five pairs of evaluations; one, against the replicas' own normalization, tells as much.
  With noise that rounds what an update makes, an order of rows seemed to matter in ResNet50 that does not.
- Permuted rows for programs that mix or keep rows by place: that is another training, and its noise hides errors (`permutes`).
- Sequences that made a run when they were iterated or measured: nobody saw the price of a line.

A run is described by a `RunSpec` and made once. What a verdict needs in any case has no limit. What causes ask for besides is
bounded for each topology, by `STARTS` and `EVALUATIONS`: what is asked for later gets no answer, and the verdict says so. With
`--thorough` there is no bound.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, final

from emulate.evaluate import fixed_batches, refusal
from emulate.program import is_ours
from emulate.recorder import IN_32_BITS, SAME_ON_ONE_DEVICE, ProbePlan, Replay
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.compare import Comparison, compare
from emulate.verify.compared_runs import Rounding
from emulate.verify.host import GENERATORS
from emulate.verify.joins import Joins
from emulate.verify.ledgers import COARSE
from emulate.verify.recorded import CONFIRMING_RUNS, NOISE_RUNS, ORDER_RUNS, Recorded, RunPair
from emulate.verify.recovery import Lives
from emulate.verify.result import RunResult, error_line, trace_of
from emulate.verify.run_spec import (
    AS_IT_STANDS,
    OWN_DRAWS,
    Noise,
    RunSpec,
    Variation,
    switched_on_both_sides,
    switched_on_one_device,
)
from emulate.verify.runner import Runner

CONFIRMING_ULPS = 16.0
OTHER_RUNS = 2
"""The reference and its first noise run: as many as a program needs that trains the same model."""
STARTS, EVALUATIONS = 6, 40
"""So many of both a topology may take before causes get no further run: nearly all programs are judged with half of that."""
LEAST = 3
"""So many starts causes get in any case: a right program in 16 bits with layers that normalize may have taken six before."""
SUMMAND_ULPS = 2.0
"""Noise, in units in the last place, for values that each replica rounds to 16 bits with an error of half a unit."""


@dataclass(frozen=True)
class Price:
    """Hold what the runs so far have cost: starts of the program, and evaluations of functions that were kept."""

    starts: int
    evaluations: int

    def __str__(self) -> str:
        return f"{self.starts} starts of the program and {self.evaluations} evaluations of its steps"


class _Spent(Exception):
    """Say that no further run is made to find a cause."""


@final
class Lab(Recorded):
    """Make each run of a verification once, and keep it.

    Args:
        runner: Starts processes. Nothing else that judges may ask it for a run (a contract of import-linter).
        seed: The seed of the verification.
        place: Where the reference runs.

    Attributes:
        settings: What all runs have in common.
        rounding: How the program as it stands rounds.
        rounding_in_32_bits: The same with its layers in 32 bits.
        apply_only: The program's functions that only apply gradients they are given: their inputs are left as they are.
        taping: The program's functions that take gradients: a replay gives them the other run's rows.
        is_bounded: Whether causes have asked for more runs than they get.
    """

    def __init__(self, runner: Runner, seed: int, place: Topology = REFERENCE) -> None:
        super().__init__()
        self.settings = runner.settings
        self.rounding = Rounding()
        self.rounding_in_32_bits = Rounding()
        self.apply_only: tuple[str, ...] = ()
        self.taping: tuple[str, ...] = ()
        self._runner, self._seed, self.place = runner, seed, place
        # Invariant: a run that was started is in here until it is taken back; `_run` alone starts one.
        self._runs: dict[RunSpec, Future[RunResult]] = {}
        # Invariant: all runs in `_runs` that were derived from the unchanged reference were derived from this one.
        self._unchanged = self._taken_back = RunSpec()
        self._functions = self._compiled = False
        # Invariant: all of the topologies' runs know how many rows the program's functions draw, or none does.
        self._drawn: Mapping[str, int] = {}
        self._failed: dict[str, str] = {}
        self._is_searching, self._started_before = False, 0
        self._num_topologies = 1
        self.is_bounded = False
        self._joins: dict[tuple[Path, Path, str, int], Joins | None] = {}

    @property
    def price(self) -> Price:
        """Return what was spent so far."""
        return Price(len(self._runner.started), self._runner.evaluations)

    def expect(self, runs: int) -> None:
        """Tell the user how many runs may follow at most; 0 where that is open."""
        self._runner.expect(runs)

    def plan(self, num_topologies: int) -> None:
        """Note how many topologies are judged: each may cost something, and runs go on to an epoch's end if they are few."""
        self._num_topologies = num_topologies
        self._runner.limit.num_runs = num_topologies + OTHER_RUNS

    @contextlib.contextmanager
    def _searching(self) -> Iterator[None]:
        """Make runs for a cause in this block, which ends where these have cost enough already."""
        self._is_searching, before = True, self._is_searching
        self._started_before = self._started_before or self.price.starts
        try:
            yield
        finally:
            self._is_searching = before

    def _check_price(self) -> None:
        price, number = self.price, self._num_topologies
        most = max(number * STARTS, self._started_before + LEAST)
        is_spent = price.starts >= most or price.evaluations >= number * EVALUATIONS
        if is_spent and self._is_searching and not self.settings.thorough:
            self.is_bounded = True
            raise _Spent

    def start_reference(self, variation: Variation = AS_IT_STANDS) -> Future[RunResult]:
        """Start a variation of the reference, or evaluate it."""
        return self._run(self._reference(variation))

    def run_reference(self, variation: Variation = AS_IT_STANDS) -> RunResult:
        """Return how a variation of the reference went."""
        return self.start_reference(variation).result()

    def start_topology(self, topology: Topology, variation: Variation = AS_IT_STANDS) -> Future[RunResult]:
        """Start the program on a topology."""
        return self._run(RunSpec(topology, variation, how="with drawn rows" if self._drawn else ""))

    def run_topology(self, topology: Topology, variation: Variation = AS_IT_STANDS) -> RunResult:
        """Return how the program went on a topology."""
        return self.start_topology(topology, variation).result()

    def pair(self, variation: Variation, topology: Trace) -> RunPair | None:
        """Run a variation of the reference, and its first noise run, to compare a run with; None where it failed."""
        run = self.start_reference(variation)
        self._run(self._noise(variation, 1))
        reference = trace_of(run.result())
        return None if reference is None else RunPair(reference, topology, variation, variation)

    def evaluate(self, variation: Variation) -> bool:
        """Evaluate a variation that follows a run, and its noise; return whether that is possible without the program."""
        specs = [self._reference(variation), self._noise(variation, 1)]
        runs = [self._run(spec, or_run=False) for spec in specs]
        is_evaluated = runs[0].result().is_evaluated
        if not is_evaluated:
            for spec in specs:
                del self._runs[spec]  # who asks for it otherwise gets a run of the program
        return is_evaluated

    def has_noise(self, pair: RunPair) -> bool:
        """Return whether rounding is measured for two traces."""
        return pair.noise_of is not None

    def has_dear_noise(self, pair: RunPair) -> bool:
        """Return whether a noise run is a start of the program."""
        run = None if pair.noise_of is None else self._runs.get(self._noise(pair.noise_of, 1))
        return run is not None and not run.result().is_evaluated

    def measure_noise(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        """Make the first noise runs, as far as they are not made yet; return those that end well."""
        if pair.noise_of is None:
            return ()
        return self._traces([self._noise(pair.noise_of, k + 1) for k in range(number)])

    def is_noise_started(self, variation: Variation) -> bool:
        """Return whether a noise run of a variation was made for another purpose already."""
        return self._noise(variation, 1) in self._runs

    def results_beside(self, variation: Variation) -> list[RunResult]:
        """Return how the reference of a variation went, and its noise runs so far."""
        specs = [self._reference(variation), *(self._noise(variation, k + 1) for k in range(NOISE_RUNS))]
        return [self._runs[spec].result() for spec in specs if spec in self._runs]

    def run_in_order(self, pair: RunPair, number: int = ORDER_RUNS) -> Sequence[Trace]:
        """Return runs with examples in order, changed by coarse rounding."""
        noise = [Noise(k + 1, COARSE, permutes=False, tells_order=True) for k in range(number)]
        return self._traces([RunSpec(None, pair.variation, one) for one in noise])

    def confirm(self, pair: RunPair, number: int = CONFIRMING_RUNS) -> Sequence[Trace]:
        """Make noise runs with a larger perturbation; return those that end well."""
        numbers = range(NOISE_RUNS + 1, NOISE_RUNS + number + 1)
        noise = [Noise(k, CONFIRMING_ULPS, self.permutes, pair.topology.directory) for k in numbers]
        return self._traces([RunSpec(None, pair.variation, one) for one in noise])

    def run_program(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        """Run the program itself on one device; return the runs that end well.

        Where the variation follows a run, the first has that run's weights. The others are noise runs.
        """
        variation, numbers = pair.variation, range(2 * NOISE_RUNS + 1, 2 * NOISE_RUNS + number + 1)
        noise = [Noise(k, CONFIRMING_ULPS, self.permutes) for k in numbers]
        specs = [RunSpec(None, variation.source, one, "of the program") for one in noise]
        if variation.follow is not None:
            specs[0] = RunSpec(None, variation, how="of the program")
        return self._traces(specs)

    def repeat(self) -> RunResult:
        """Run the unchanged reference once more, once, to see whether it repeats."""
        return self._run(_AGAIN).result()

    def repeated(self) -> Trace | None:
        """Return the unchanged reference run once more; None as long as nobody has asked whether it repeats."""
        return trace_of(self._runs[_AGAIN].result()) if _AGAIN in self._runs else None

    def same_seed(self) -> Trace | None:
        """Return a run that was made anyway, with the unchanged reference's examples and draws; None if there is none."""
        specs = [spec for k in range(NOISE_RUNS) if (spec := self._noise(AS_IT_STANDS, k + 1)) in self._runs]
        if any(self._runs[spec].result().is_evaluated for spec in specs):
            return None
        return next(iter(self._traces(specs[:1])), None)

    def start_otherwise(self, how: Literal["compiled", "by its functions"]) -> Future[RunResult]:
        """Run the unchanged reference in another way, and take that for the unchanged one from now on.

        Args:
            how: With its eager steps compiled, or with the inputs of its functions as examples.

        Returns:
            The run.
        """
        self._compiled |= how == "compiled"
        self._functions |= how == "by its functions"
        self._taken_back, self._unchanged = self._unchanged, RunSpec(how=how)
        return self.start_reference()

    def take_back(self) -> RunResult:
        """Return to the unchanged reference before: functions get no examples, or train otherwise when they are compiled."""
        self._functions = self._compiled = False
        self._unchanged = self._taken_back
        # What was derived meanwhile is of the other one.
        self._runs = {s: run for s, run in self._runs.items() if s.topology is not None or s == self._unchanged}
        return self.run_reference()

    def take_drawn(self, drawn: Mapping[str, int]) -> None:
        """Note how many rows functions draw themselves: what a topology did without knowing that says nothing."""
        self._drawn = drawn
        self._runs = {spec: run for spec, run in self._runs.items() if spec.topology is None}

    def compare_switched(self, pair: RunPair, asked: Sequence[str]) -> Comparison | None:
        """Run both sides again with suspects switched off, the reference on the topology's rows: all, or each replica's."""
        with contextlib.suppress(_Spent), self._searching():
            return self._compare_switched(pair, asked)
        return None

    def _compare_switched(self, pair: RunPair, asked: Sequence[str]) -> Comparison | None:
        both, topology = switched_on_both_sides(pair.variation, asked), self._topology_switched(pair, asked)
        if topology is None:
            return None
        if both != pair.variation and both.follow is not None:
            both = replace(both, follow=replace(both.follow, trace=topology.directory))
        variation = switched_on_one_device(both, asked, topology)
        if variation is None:
            return None
        if variation.replay is not None and self.has_dear_noise(pair):  # what it rounds is known from the same steps
            run = trace_of(self.run_reference(variation))
            if run is None:
                self._note_failure(variation)
                return None
            own = self.compare(pair, kinks=False, is_known=lambda first: first.is_clear)
            return compare(run, topology, ()).with_noise_of(own)
        switched = self._pair_of_one_device(pair, variation, topology) or self.pair(variation, topology)
        if switched is None:
            self._note_failure(variation)
            return None
        # What the program starts with does not depend on the rows that it is given: no run with others is made for that.
        of_program = replace(variation.source, replay=None)
        source = None if variation.follow is None else trace_of(self.run_reference(of_program))
        switched = replace(switched, variation=variation, source=source)
        return self.compare(switched, kinks=switched.reference.follows, is_known=lambda first: first.is_clear)

    def _note_failure(self, variation: Variation) -> None:
        if variation.replay is None or not variation.replay.is_only_evaluated:
            failed = self.run_reference(variation)
            self._failed[failed.label] = _ending(failed, variation.replay)

    def _topology_switched(self, pair: RunPair, asked: Sequence[str]) -> Trace | None:
        """Return the topology's run with suspects switched off, as far as they are switched off on both sides."""
        if pair.run is None or pair.run.status != "ok":
            return None
        both = switched_on_both_sides(pair.variation, asked)
        if both == pair.variation:
            return pair.topology
        return trace_of(self.run_topology(pair.run.topology, replace(both, replay=None, follow=None)))

    def find_joins(
        self, pair: RunPair, asked: Sequence[str], optimizer: str, step: int, *, may_start: bool = True
    ) -> Joins | None:
        """Find what must see the whole batch in a step; None where its function cannot be evaluated, or nothing is found."""
        with contextlib.suppress(_Spent), self._searching():
            return self._find_joins(pair, asked, optimizer, step, may_start)
        return None

    def _find_joins(self, pair: RunPair, asked: Sequence[str], optimizer: str, step: int, may_start: bool) -> Joins | None:
        topology = self._topology_switched(pair, asked)
        if topology is None:
            return None
        alone = replace(switched_on_both_sides(pair.variation, asked).as_it_normalizes, follow=None, replay=None)
        source, number = trace_of(self.run_reference(alone)), len(topology.replicas)
        if source is None or refusal(source) is not None:
            return None
        told = Replay(topology.directory, number, summed=True, told=number)
        local = None
        if not _fits(source, told):
            if not may_start:
                return None
            local = trace_of(self.run_reference(replace(alone, replay=told.of_a_share)))
            if local is None or refusal(local) is not None:
                return None
        key = (source.directory, topology.directory, optimizer, step)
        if key not in self._joins:
            self._check_price()
            found = self._runner.find_joins(source, local, topology, optimizer, step, permutes=self.permutes)
            self._joins[key] = Joins.read(found, optimizer, step)
        return self._joins[key]

    def _pair_of_one_device(self, pair: RunPair, variation: Variation, topology: Trace) -> RunPair | None:
        """Return the run on one device that is there, if the switches change only rounding there and the topology agrees."""
        base = pair.variation
        if base.follow is not None:
            return None  # each step is judged at the state that this run has
        if replace(variation, switches=base.switches) != base or not variation.switches - base.switches <= SAME_ON_ONE_DEVICE:
            return None
        there = self.pair(base, topology)
        return there if there is not None and self.compare_enough(there).is_equivalent else None

    def take_first_failure(self) -> str | None:
        """Return the first failed run's name with its error, and forget all failures."""
        failed = next((f"'{label}'{ending}" for label, ending in self._failed.items()), None)
        self._failed.clear()
        return failed

    def vary_hosts(self, pair: RunPair, what: str) -> RunResult | None:
        """Run the topology with hosts that differ in `seeds`, `hashes` or `listing`; None where that would show nothing."""
        run = pair.run
        if run is None or run.status != "ok" or run.topology.num_stepping_hosts == 1:
            return None
        if what == "seeds":
            seeded = {(host, event["generator"]) for host, event in run.trace.of("seeded")} if run.trace is not None else set()
            shows = run.trace is not None and not seeded >= set(product(range(run.topology.num_hosts), GENERATORS))
        elif what == "hashes":
            shows = bool(self.places_of(what)) and os.environ.get("PYTHONHASHSEED", "random") == "random"
        else:
            shows = bool(self.places_of(what))
        if not shows:
            return None
        with contextlib.suppress(_Spent), self._searching():
            return self.run_topology(run.topology, replace(pair.variation, replay=None, follow=None, host_variation=what))
        return None

    def places_of(self, what: str) -> Sequence[str]:
        """Return where the program's own files depend on `hashes` or on the `listing` of folders."""
        program = self.settings.program
        return program.hash_places() if what == "hashes" else program.listing_places()

    def run_with_faults(self, topology: Topology) -> Lives:
        """Run the program with the requested faults, and start it again as often as it takes."""
        return self._runner.start_with_faults(topology, OWN_DRAWS.plan(self._seed)).result()

    def run_as_written(self, topology: Topology, seconds: float) -> RunResult:
        """Run the program as it is written on a topology, with nothing recorded."""
        return self._runner.start_unprobed(f"{topology} as written", topology, seconds).result()

    def run_plain(self, seconds: float) -> RunResult:
        """Run the program without emulation and recording."""
        return self._runner.start_plain(seconds).result()

    def empty_trace(self, run: RunResult) -> Trace:
        """Return an empty trace, for a run that left none."""
        return self._runner.empty_trace(run)

    def _reference(self, variation: Variation) -> RunSpec:
        return self._unchanged if variation == AS_IT_STANDS else RunSpec(None, variation)

    def _noise(self, variation: Variation, number: int) -> RunSpec:
        return RunSpec(None, variation, Noise(number, permutes=self.permutes))

    def _traces(self, specs: Sequence[RunSpec]) -> list[Trace]:
        """Make runs, several at a time, and return the traces of those that end well."""
        runs = [self._run(spec) for spec in specs]
        return [trace for run in runs if (trace := trace_of(run.result())) is not None]

    def _run(self, spec: RunSpec, *, or_run: bool = True) -> Future[RunResult]:
        if spec not in self._runs:
            self._check_price()
            self._runs[spec] = self._start(spec, or_run)
        return self._runs[spec]

    def _start(self, spec: RunSpec, or_run: bool) -> Future[RunResult]:
        """Start a run; one that can be evaluated runs the program where its functions do not allow it, if it may."""
        label, plan, variation = spec.label(self.place), self._plan(spec), spec.variation
        if spec.topology is not None:
            return self._runner.start(label, spec.topology, plan)
        if spec.starts_the_program:
            return self._runner.start(label, self.place, plan, reference=True)
        source, replay = variation.source, variation.replay
        if replay is not None:
            or_run = or_run and not replay.is_only_evaluated
            trace = trace_of(self.run_reference(replace(source, replay=None)))  # it takes the batches of all variations
            if trace is not None and or_run and refusal(trace) is not None:  # then no other run has functions either
                return self._runner.start(label, self.place, plan, reference=True)
            if trace is not None and not _fits(trace, replay):
                source = replace(source, replay=replay.of_a_share)
        return self._runner.start_evaluated(label, self.place, plan, self.start_reference(source), or_run=or_run)

    def _plan(self, spec: RunSpec) -> ProbePlan:
        plan = spec.variation.plan(self._seed)
        if spec.topology is not None:
            return replace(plan, drawn=self._drawn, leads=True)
        if spec.how in ("again", "by its functions"):
            return replace(plan, functions=self._functions)
        plan = replace(plan, apply_only=self.apply_only, taping=self.taping, functions=self._functions, compiled=self._compiled)
        if spec.noise is None:
            return replace(plan, keeps_functions=spec.starts_the_program and spec.how != "of the program")
        rounding = self.rounding_in_32_bits if IN_32_BITS in spec.variation.switches else self.rounding
        return replace(
            plan,
            noise_seed=spec.noise.number,
            permute=spec.noise.permutes,
            perturb=spec.noise.ulps * rounding.units,
            short=rounding.units > 1,
            summands=spec.noise.summands,
            perturb_summands=max(spec.noise.ulps * rounding.units, SUMMAND_ULPS * rounding.coarsest),
        )


_AGAIN = RunSpec(how="again")


def _fits(source: Trace, replay: Replay) -> bool:
    """Return whether the functions of a run take the batches of a replay, or would not be asked for them."""
    if replay.of_all_rows.shares > 1 or replay.of_all_rows.part or refusal(source) is not None:
        return True
    sizes, batch = fixed_batches(source), Trace(replay.trace).batch
    if not sizes or batch is None:
        return not sizes or replay.shares == 1
    return batch / replay.shares in sizes


def _ending(failed: RunResult, replay: Replay | None) -> str:
    """Return the text about a failed re-run: whose error it is, and what may have led to it."""
    where = (
        f", on one device that gets {replay.told} as the number of replicas" if replay is not None and replay.told > 1 else ""
    )
    raised_in = re.findall(r'File "([^"]+)"', failed.failure or "")
    is_own = failed.status == "failed" and bool(raised_in) and not is_ours(raised_in[-1])
    whose = ", where the program itself raises an error" if is_own else ""
    return f"{where}{whose}: {error_line(failed.failure or failed.where, 'no error was seen')}"
