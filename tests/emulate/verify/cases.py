"""Cases for the causes: simulated training with a planted bug, or traces made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.judge import Judgement
from emulate.verify.repeats import Rerun
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem, train


def codes(found: Judgement) -> list[str]:
    """The causes that were named, in their order."""
    return [cause.code for cause in found.causes]


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
        return Case(reference, topology, self.noise(right), rerun=rerun, **options)


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
