"""Cases for the causes: simulated training with a planted bug, or traces made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulate.topology import REFERENCE
from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.compare import Comparison
from emulate.verify.judge import Judgement
from emulate.verify.recorded import CONFIRMING_RUNS, NOISE_RUNS, Recorded, RunPair
from emulate.verify.result import Met, RunResult
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem, train


def codes(found: Judgement) -> list[str]:
    """The causes that were named, in their order."""
    return [cause.code for cause in found.causes]


def _nothing(*_: str) -> None:
    return None


@dataclass(frozen=True)
class Rerun:
    """Both sides with a suspect switched off, and the noise runs that belong to them."""

    reference: Trace
    topology: Trace
    noise: Sequence[Trace] = ()
    confirm: Callable[[], Sequence[Trace]] = tuple

    def compare(self) -> Comparison:
        """As a lab compares them."""
        return FakeLab(self.noise, confirm=self.confirm).compare(
            RunPair(self.reference, self.topology), kinks=self.reference.follows
        )


class FakeLab(Recorded):
    """Gives what a test has made for a question, and starts nothing. `asked` has the switches that were asked for."""

    def __init__(
        self,
        noise: Sequence[Trace] = (),
        *,
        rerun: Callable[..., Rerun | None] = _nothing,
        repeat: Callable[[], Trace | None] = _nothing,
        confirm: Callable[[], Sequence[Trace]] = tuple,
        reported: Callable[[], Sequence[Trace]] = tuple,
        hosts: Mapping[str, Callable[[], RunResult | None]] | None = None,
        places: Mapping[str, Sequence[str]] | None = None,
        met_again: Met | None = None,
    ) -> None:
        super().__init__(noise)
        self.asked: list[tuple[str, ...]] = []
        self._rerun, self._repeat, self._confirm, self._reported = rerun, repeat, confirm, reported
        self._hosts, self._places, self._met_again = hosts or {}, places or {}, met_again

    def confirm(self, pair: RunPair, number: int = CONFIRMING_RUNS) -> Sequence[Trace]:
        return self._confirm()[:number]

    def run_program(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        return self._reported()[:number]

    def compare_switched(self, pair: RunPair, asked: Sequence[str]) -> Comparison | None:
        self.asked.append(tuple(asked))
        again = self._rerun(*asked)
        return None if again is None else again.compare()

    def repeat(self) -> RunResult | None:
        trace = self._repeat()
        if trace is None and self._met_again is None:
            return None
        result = RunResult("reference again", REFERENCE, trace, "failed" if trace is None else "ok")
        result.met = self._met_again or Met()
        return result

    def vary_hosts(self, pair: RunPair, what: str) -> RunResult | None:
        return self._hosts.get(what, _nothing)()

    def places_of(self, what: str) -> Sequence[str]:
        return self._places.get(what, ())


def case_of(
    reference: Trace,
    topology: Trace,
    noise: Sequence[Trace] = (),
    *,
    source: Trace | None = None,
    own_seeds: Callable[[], RunResult | None] = _nothing,
    own_hashes: Callable[[], RunResult | None] = _nothing,
    hash_places: Sequence[str] = (),
    own_listing: Callable[[], RunResult | None] = _nothing,
    listing_places: Sequence[str] = (),
    met_alone: Callable[[], Sequence[Met]] = tuple,
    **options: Any,
) -> Case:
    """Return a case whose lab gives what a test has made; `met_alone` has the reference's, its repeat's, then the others'."""
    of_lab = {name: options.pop(name) for name in ("rerun", "repeat", "confirm", "reported") if name in options}
    met = list(met_alone())
    lab = FakeLab(
        noise,
        hosts={"seeds": own_seeds, "hashes": own_hashes, "listing": own_listing},
        places={"hashes": hash_places, "listing": listing_places},
        met_again=met[1] if len(met) > 1 else None,
        **of_lab,
    )
    return Case(RunPair(reference, topology, source=source), lab, met_alone=[*met[:1], *met[2:]], **options)


class Folder:
    """Makes traces, each in a folder of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0

    def made(self, topology: str = "1x1", **options: Any) -> Made:
        self._count += 1
        return Made(self._path / f"{self._count}", topology, **options)

    def trained(self, problem: Problem, replicas: int = 1, facts: Mapping[str, Any] | None = None, **options: Any) -> Trace:
        made = self.made(f"1x{replicas}")
        if facts is not None:
            made.event({"event": "program", **facts})
        return train(problem, made, replicas, **options).trace()

    def noise(self, problem: Problem) -> list[Trace]:
        return [self.trained(problem, noise=k) for k in (1, 2, 3)]

    def case(
        self,
        right: Problem,
        wrong: Problem,
        replicas: int = 4,
        *,
        facts: Mapping[str, Any] | None = None,
        switches: Mapping[str, tuple[Problem, Problem]] | None = None,
        **options: Any,
    ) -> Case:
        """A program that is right on one device and wrong on several; `switches` says what re-runs give."""

        def rerun(*asked: str) -> Rerun | None:
            if asked[-1] not in (switches or {}):
                return None
            one, many = (switches or {})[asked[-1]]
            return Rerun(self.trained(one), self.trained(many, replicas), self.noise(one))

        reference, topology = self.trained(right), self.trained(wrong, replicas, facts)
        return case_of(reference, topology, self.noise(right), rerun=rerun, **options)


Step = Callable[[Made, int], None]


def loop(
    made: Made,
    step: Step,
    steps: int = 3,
    replicas: int | None = None,
    weights: int = 128,
    strategy: str = "MirroredStrategy",
) -> Trace:
    """A trace by hand: a strategy, equal initial weights, then steps."""
    number = replicas if replicas is not None else int(made.topology.split("x")[1])
    made.event({"event": "strategy", "name": strategy, "replicas": number, "local": number})
    for replica in range(number):
        made.initial({"w": np.ones(weights, "f4")}, replica=replica)
    for k in range(steps):
        step(made, k)
    return made.trace()
