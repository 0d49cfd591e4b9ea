"""Make the reference in all its variations, each with noise runs that show the effect of rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final, overload

from emulate.evaluate import fixed_batches, refusal
from emulate.interventions import splits_of
from emulate.recorder import IN_32_BITS, SAME_ON_ONE_DEVICE, Follow, ProbePlan, Replay
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.compared_runs import Rounding
from emulate.verify.result import RunResult
from emulate.verify.runner import Runner

NOISE_RUNS = 3
CONFIRMING_RUNS = 4
CONFIRMING_ULPS = 16.0
ORDER_RUNS = 2
SUMMAND_ULPS = 2.0
"""Noise, in units in the last place, for values that each replica rounds to 16 bits with an error of half a unit."""


@dataclass(frozen=True)
class Variation:
    """Describe how a run differs from the unchanged program.

    Attributes:
        own_draws: Random draws are the program's own; else they are a function of seed, place and row.
        switches: Suspects switched off.
        replay: The rows come from another run.
        follow: The gradients that are applied come from another run.
        own_seeds: Each host has a seed of its own.
        own_hashes: Each host hashes strings in its own way.
        own_listing: The hosts after the first list folders in another order.
    """

    own_draws: bool = False
    switches: frozenset[str] = frozenset()
    replay: Replay | None = None
    follow: Follow | None = None
    own_seeds: bool = False
    own_hashes: bool = False
    own_listing: bool = False

    def plan(self, seed: int) -> ProbePlan:
        """Return the probe's plan for it; the runner sets the place of its trace."""
        led_by = self.replay or self.follow
        initial = None if led_by is None else led_by.trace
        return ProbePlan(
            trace=Path(),
            seed=seed,
            own_draws=self.own_draws,
            switches=self.switches,
            replay=self.replay,
            follow=self.follow,
            own_seeds=self.own_seeds,
            own_hashes=self.own_hashes,
            own_listing=self.own_listing,
            initial=initial,
        )

    @property
    def source(self) -> Variation:
        """Return the variation whose functions do the steps of this one, on other rows and with other gradients."""
        replay = None if self.replay is None or self.replay.is_of_rows else self.replay.of_all_rows
        own = replace(self, follow=None, replay=replay)
        return own if self.follow is None else replace(own, switches=self.switches - SAME_ON_ONE_DEVICE)

    @property
    def as_it_normalizes(self) -> Variation:
        """Return the variation with the BatchNormalization of one device."""
        return replace(self, switches=frozenset(switch for switch in self.switches if not splits_of([switch])))

    def label(self, name: str) -> str:
        """Return the name of a run of this variation."""
        parts = [name, *(["own draws"] if self.own_draws else []), *sorted(self.switches)]
        parts += ["own seeds"] if self.own_seeds else []
        parts += ["own hashes"] if self.own_hashes else []
        parts += ["own listing"] if self.own_listing else []
        if self.replay is not None:
            what = "rows" if self.replay.shares == 1 else "sums of shares" if self.replay.summed else "shares"
            what = "losses of shares" if self.replay.by_loss else "inputs" if self.replay.inputs else what
            what = f"first of {self.replay.shares} shares" if self.replay.part else what
            what += " at tapes" if self.replay.taped else ""
            regrouped = " regrouped" if self.replay.regrouped else " backwards" if self.replay.backwards else ""
            count = " numbered" if self.replay.numbered else ""
            count += f" told {self.replay.told}" if self.replay.told > 1 else ""
            batch = f" a batch of {self.replay.batch_of}" if self.replay.batch_of > 1 else ""
            batch += f" and {self.replay.workers} workers" if self.replay.workers > 1 else ""
            rate = f" {self.replay.rate:.4g} times the learning rate" if self.replay.rate != 1 else ""
            parts.append(f"{what} of {self.replay.trace.name}{regrouped}{count}{batch}{rate}")
        parts += [] if self.follow is None else [f"gradients of {self.follow.trace.name}"]
        return " ".join(parts)

    def without(self, switch: str) -> Variation:
        """Return the variation with one more suspect switched off."""
        return replace(self, switches=self.switches | {switch})


@final
class NoiseRuns(Sequence[Trace]):
    """Make the noise runs of one variation as they are asked for: `[:1]` makes the first, everything else all of them.

    More runs only make the noise floor wider. So what agrees beside the first run agrees beside all of them (`compare_enough`).

    Args:
        start: Starts the runs with these numbers, from 1.
        number: How many there are in all.
        made: The first ones, as far as they are started already.
    """

    def __init__(
        self,
        start: Callable[[Sequence[int]], list[Future[RunResult]]],
        number: int = NOISE_RUNS,
        made: Sequence[Future[RunResult]] = (),
    ) -> None:
        self._start, self._number = start, number
        self._runs = list(made)

    def start(self, number: int) -> None:
        """Start this many runs, as far as they are not started yet."""
        wanted = range(len(self._runs) + 1, number + 1)
        self._runs += self._start(wanted) if wanted else []

    def results(self) -> list[RunResult]:
        """Return how each run went that was started so far."""
        return [run.result() for run in self._runs]

    def _traces(self, number: int) -> list[Trace]:
        self.start(number)
        return [trace for run in self._runs[:number] if (trace := trace_of(run)) is not None]

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trace]: ...
    def __getitem__(self, index: int | slice) -> Trace | Sequence[Trace]:
        is_first = isinstance(index, slice) and index == slice(None, 1)
        return self._traces(1) if is_first else self._traces(self._number)[index]

    def __len__(self) -> int:
        return len(self._traces(self._number))


Traces = tuple[Trace, Sequence[Trace]]
"""A reference and its noise runs."""


@dataclass
class Yardstick:
    """Hold the runs of one variation of the reference."""

    reference: Future[RunResult]
    noise: NoiseRuns | None = None

    def results(self) -> list[RunResult]:
        """Return how each of them went."""
        return [self.reference.result(), *(self.noise.results() if self.noise is not None else [])]

    def traces(self) -> Traces | None:
        """Return the reference and its noise; None if the program raised or hung."""
        trace = trace_of(self.reference)
        return None if trace is None else (trace, self.noise if self.noise is not None else ())


def trace_of(run: Future[RunResult] | None) -> Trace | None:
    """Return the trace of a run that ended well."""
    result = run.result() if run is not None else None
    return result.trace if result is not None and result.status == "ok" else None


def _fits(source: Trace, replay: Replay) -> bool:
    """Return whether the functions of a run take the batches of a replay, or would not be asked for them."""
    if replay.of_all_rows.shares > 1 or replay.of_all_rows.part or refusal(source) is not None:
        return True
    sizes, batch = fixed_batches(source), Trace(replay.trace).batch
    if not sizes or batch is None:
        return not sizes or replay.shares == 1
    return batch / replay.shares in sizes


class Yardsticks:
    """Make each variation's runs once.

    Args:
        runner: Makes them.
        seed: The seed of the verification.
        reference: Where the reference runs.

    Attributes:
        seed: The seed of the verification.
        rounding: That of the program as it stands.
        rounding_in_32_bits: The same with its layers in 32 bits.
        apply_only: The program's functions that only apply gradients they are given: their inputs are left as they are.
        taping: The program's functions that take gradients: a replay gives them the other run's rows.
        drawn: How many rows the program's functions draw that get none.
        compiled: Whether what the reference does in eager code is compiled.
        functions: Whether the reference makes its steps in a `tf.function` without `Strategy.run`.
        permutes: Whether noise runs have the rows of each batch in another order.
        repeat: The unchanged reference, run once more; None as long as nobody has asked whether it repeats.
    """

    def __init__(self, runner: Runner, seed: int, reference: Topology = REFERENCE) -> None:
        self._reference = reference
        self.rounding = Rounding()
        self.rounding_in_32_bits = Rounding()
        self.apply_only: tuple[str, ...] = ()
        self.taping: tuple[str, ...] = ()
        self.drawn: Mapping[str, int] = {}
        self.compiled = False
        self.functions = False
        self.permutes = True
        self.repeat: Future[RunResult] | None = None
        self._runner = runner
        self.seed = seed
        self._known: dict[Variation, Yardstick] = {}
        self._of_program: dict[Variation, NoiseRuns] = {}
        self._confirming: dict[tuple[Variation, Path], NoiseRuns] = {}
        self._topologies: dict[tuple[Topology, Variation], Future[RunResult]] = {}

    def reference(self, variation: Variation) -> Yardstick:
        """Return the reference alone."""
        if variation not in self._known:
            if variation.source == variation:
                run = self._start("reference", variation, replace(self._plan(variation), keeps_functions=True))
            else:
                (run,) = self._evaluated(variation, self._reference_plan(variation))
            self._known[variation] = Yardstick(run)
        return self._known[variation]

    def take_back_functions(self, known: Yardstick) -> None:
        """Note that the inputs of the functions are not the examples, or that they do something else when they are compiled."""
        self.functions = self.compiled = False
        self._known = {Variation(): known}  # what was derived meanwhile is of the others

    def with_noise(self, variation: Variation) -> Yardstick:
        """Return the reference and its noise runs, of which the first is started."""
        yardstick = self.reference(variation) if variation.source == variation else self._derived(variation)
        if yardstick.noise is None:
            yardstick.noise = self._noise_runs(variation)
            yardstick.noise.start(1)
        return yardstick

    def led(self, variation: Variation) -> bool:
        """Return whether the steps of a variation can be evaluated, and do so; the program is not run for it.

        Args:
            variation: Follows a run.

        Returns:
            Whether there is a reference now.
        """
        yardstick = self._derived(variation, or_run=False)
        is_evaluated = yardstick.reference.result().is_evaluated
        if not is_evaluated:
            del self._known[variation]  # who asks for it otherwise gets a run of the program
        return is_evaluated

    def _derived(self, variation: Variation, *, or_run: bool = True) -> Yardstick:
        """Return a reference that does another one's steps, with its first noise run, made at once with it."""
        if variation not in self._known:
            both = {**self._reference_plan(variation), **self._noise_plans(variation, [1], 1.0)}
            run, first = self._evaluated(variation, both, or_run=or_run)
            self._known[variation] = Yardstick(run, self._noise_runs(variation, [first]))
        return self._known[variation]

    def _noise_runs(self, variation: Variation, made: Sequence[Future[RunResult]] = ()) -> NoiseRuns:
        return NoiseRuns(lambda numbers: self._evaluated(variation, self._noise_plans(variation, numbers, 1.0)), made=made)

    def _plan(self, variation: Variation) -> ProbePlan:
        plan = variation.plan(self.seed)
        return replace(plan, apply_only=self.apply_only, taping=self.taping, functions=self.functions, compiled=self.compiled)

    def _reference_plan(self, variation: Variation) -> dict[str, ProbePlan]:
        return {self._label("reference", variation): self._plan(variation)}

    def leave_rows_in_order(self) -> None:
        """Let later noise runs differ by rounding alone: the order of the examples matters to this program."""
        self.permutes = False
        for yardstick in self._known.values():
            yardstick.noise = None

    def rounding_of(self, variation: Variation) -> Rounding:
        """Return how a variation rounds."""
        return self.rounding_in_32_bits if IN_32_BITS in variation.switches else self.rounding

    def again(self) -> Future[RunResult]:
        """Run the unchanged reference once more, once, to see whether it repeats."""
        if self.repeat is None:
            plan = replace(Variation().plan(self.seed), functions=self.functions)
            self.repeat = self._start("reference again", Variation(), plan)
        return self.repeat

    def same_seed(self) -> Trace | None:
        """Return a run that was made anyway, with the unchanged reference's examples and draws; None if there is none."""
        noise = self._known[Variation()].noise
        return None if noise is None or any(run.is_evaluated for run in noise.results()) else next(iter(noise[:1]), None)

    def by_functions(self) -> Future[RunResult]:
        """Run the unchanged reference with the inputs of its functions as examples, and do so from now on."""
        self.functions = True
        plan = replace(Variation().plan(self.seed), functions=True)
        self._known[Variation()] = Yardstick(self._start("reference by its functions", Variation(), plan))
        return self._known[Variation()].reference

    def by_compiled_steps(self) -> Future[RunResult]:
        """Run the reference with its eager steps compiled, and do so from now on."""
        self.compiled = True
        plan = replace(self._plan(Variation()), keeps_functions=True)
        self._known[Variation()] = Yardstick(self._start("reference compiled", Variation(), plan))
        return self._known[Variation()].reference

    def confirming(self, variation: Variation, topology: Trace) -> NoiseRuns:
        """Return noise runs with a larger perturbation: a small difference may come from a kink or a gradient that cancels.

        Args:
            variation: Of the reference.
            topology: The run that differs, whose local gradients say what cancels.

        Returns:
            The traces of those that end well; none is started yet.
        """
        if (variation, topology.directory) not in self._confirming:

            def start(numbers: Sequence[int]) -> list[Future[RunResult]]:
                later = [NOISE_RUNS + number for number in numbers]
                return self._evaluated(variation, self._noise_plans(variation, later, CONFIRMING_ULPS, topology.directory))

            self._confirming[variation, topology.directory] = NoiseRuns(start, CONFIRMING_RUNS)
        return self._confirming[variation, topology.directory]

    def of_the_program(self, variation: Variation) -> NoiseRuns:
        """Return runs of the program itself, for what it reports between its steps; none is started yet.

        Where the variation follows a run, the first has that run's weights. The others are noise runs.
        """
        if variation not in self._of_program:

            def start(numbers: Sequence[int]) -> list[Future[RunResult]]:
                follows = variation.follow is not None and 1 in numbers
                plans = {self._label("program", variation): self._plan(variation)} if follows else {}
                noise = [2 * NOISE_RUNS + number for number in numbers if number > 1 or not follows]
                plans |= self._noise_plans(variation.source, noise, CONFIRMING_ULPS)
                return [self._runner.start(label, self._reference, plan, reference=True) for label, plan in plans.items()]

            self._of_program[variation] = NoiseRuns(start)
        return self._of_program[variation]

    def rounded_in_order(self, variation: Variation, ulps: float) -> NoiseRuns:
        """Return runs with examples in order, changed by rounding of this many units; none is started yet.

        Args:
            variation: Of the reference.
            ulps: By how many units in the last place gradients are off.

        Returns:
            The traces of those that end well.
        """

        def start(numbers: Sequence[int]) -> list[Future[RunResult]]:
            return self._evaluated(variation, self._noise_plans(variation, numbers, ulps, permute=False))

        return NoiseRuns(start, ORDER_RUNS)

    def take_drawn(self, drawn: Mapping[str, int]) -> None:
        """Note how many rows functions draw themselves: what a topology did without knowing that says nothing."""
        self.drawn = drawn
        self._topologies.clear()

    def topology(self, topology: Topology, variation: Variation) -> Future[RunResult]:
        """Run the topology in this variation, once."""
        if (topology, variation) not in self._topologies:
            plan = replace(variation.plan(self.seed), drawn=self.drawn, leads=True)
            label = variation.label(f"{topology} with drawn rows" if self.drawn else str(topology))
            self._topologies[topology, variation] = self._runner.start(label, topology, plan)
        return self._topologies[topology, variation]

    def _noise_plans(
        self, variation: Variation, numbers: Sequence[int], ulps: float, summands: Path | None = None, *, permute: bool = True
    ) -> dict[str, ProbePlan]:
        """Return, by the label of the run, how each noise run differs from the reference of a variation."""
        rounding, permute = self.rounding_of(variation), permute and self.permutes
        plan = replace(
            self._plan(variation),
            permute=permute,
            perturb=ulps * rounding.units,
            short=rounding.units > 1,
            summands=summands,
            perturb_summands=max(ulps * rounding.units, SUMMAND_ULPS * rounding.coarsest),
        )

        def label(number: int) -> str:
            name = f"noise {number}" if permute else f"noise {number} in order"
            name = name if permute == self.permutes else f"{name} of {ulps:.0f} units"
            return self._label(name if summands is None else f"{name} for {summands.name}", variation)

        return {label(number): replace(plan, noise_seed=number) for number in numbers}

    def _evaluated(
        self, variation: Variation, plans: Mapping[str, ProbePlan], *, or_run: bool = True
    ) -> list[Future[RunResult]]:
        """Make runs on one device from the functions of one that gets its own examples and applies its own gradients."""
        source = self.reference(variation.source).reference
        or_run = or_run and not (variation.replay is not None and variation.replay.is_only_evaluated)
        if variation.replay is not None and (trace := trace_of(source)) is not None and not _fits(trace, variation.replay):
            source = self.reference(replace(variation.source, replay=variation.replay.of_a_share)).reference
        return [
            self._runner.start_evaluated(label, self._reference, plan, source, or_run=or_run) for label, plan in plans.items()
        ]

    def _label(self, name: str, variation: Variation) -> str:
        return variation.label(name if self._reference == REFERENCE else f"{name} on {self._reference}")

    def _start(self, name: str, variation: Variation, plan: ProbePlan) -> Future[RunResult]:
        return self._runner.start(self._label(name, variation), self._reference, plan, reference=True)
