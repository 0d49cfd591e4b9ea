"""A program that faults befell: did it go on to its end, and is what it made the same as without them?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from emulate.faults import Fault, Fired, never_fired
from emulate.probe import ProbePlan, Report, Step, Trace, Variable
from emulate.verify.compare import Comparison, compare
from emulate.verify.result import RunResult
from emulate.verify.verdict import FaultReport

Steps = dict[str, list[dict[int, Step]]]


@dataclass
class Lives:
    """The runs from one start of a program to the next.

    Attributes:
        faults: What was to befall it.
        fired: What did.
        runs: How each life went; only the last one can be the program's end.
    """

    faults: tuple[Fault, ...]
    fired: list[Fired] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)

    def add(self, run: RunResult, plan: ProbePlan, fired: Sequence[Fired]) -> None:
        """A life is over."""
        run.trace = Trace(plan.trace)
        self.runs.append(run)
        self.fired = list(fired)

    @property
    def last(self) -> RunResult:
        """The life in which the program ended, or did not."""
        return self.runs[-1]

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return len(self.runs) - 1

    @property
    def went_on_from(self) -> list[int]:
        """Of each restart, after how many steps the program went on; 0 where it began anew."""
        return [_resumed_at(run.trace) for run in self.runs[1:]]


def _resumed_at(trace: Trace | None) -> int:
    return max((int(event["step"]) for _, event in (trace.of("resumed") if trace is not None else ())), default=0)


@dataclass
class Recovery:
    """What became of a program with faults, beside the same program on the same topology without.

    Args:
        lives: With the faults.
        without: Recorded without them.
    """

    lives: Lives
    without: Trace

    @property
    def missed(self) -> list[str]:
        """Of each fault that did not come to pass, what is said of it."""
        there = {one.number for one in self.lives.fired}
        return [never_fired(fault) for number, fault in enumerate(self.lives.faults) if number not in there]

    @property
    def has_ended(self) -> bool:
        """Whether the program came to its end."""
        return self.lives.last.status == "ok"

    @cached_property
    def comparison(self) -> Comparison | None:
        """With the run without faults, step by step; None where nothing can be compared."""
        traces = [run.trace for run in self.lives.runs if run.trace is not None]
        if not traces or not self.has_ended:
            return None
        ours = JoinedTrace(traces)
        return compare(JoinedTrace([self.without], ours.indices), ours)

    @property
    def result(self) -> str | None:
        """`identical` (bit by bit), `within-noise`, `different`, or None where it is not known."""
        found = self.comparison
        if found is None or not found.points:
            return None
        if found.exceeding:
            return "different"
        return "identical" if all(point.measure.error == 0 for point in found.points) else "within-noise"

    def reports(self) -> tuple[FaultReport, ...]:
        """One for each fault."""
        return tuple(self._report(number, fault) for number, fault in enumerate(self.lives.faults))

    def _report(self, number: int, fault: Fault) -> FaultReport:
        fired = next((one for one in self.lives.fired if one.number == number), None)
        worst = self.comparison.worst if self.comparison is not None else None
        return FaultReport(
            fault=str(fault),
            fired=fired is not None,
            host=getattr(fault, "host", None),
            step=fired.step if fired is not None else getattr(fault, "step", None),
            phase=getattr(fault, "phase", None),
            recovered=self.has_ended if fired is not None else None,
            restarts=self.lives.restarts,
            went_on_from=tuple(self.lives.went_on_from),
            result=self.result if fired is not None else None,
            error=worst.error if worst is not None and fired is not None else None,
        )


class JoinedTrace(Trace):
    """The traces of the lives of one program as one: of a step that was made twice the later counts.

    Args:
        lives: Their traces, in order.
        only: Of each optimizer the numbers of the steps that are wanted; all unless given.
    """

    def __init__(self, lives: Sequence[Trace], only: Mapping[str, Collection[int]] | None = None) -> None:
        super().__init__(lives[-1].directory)
        self._lives = lives
        self._only = only

    @property
    def indices(self) -> dict[str, list[int]]:
        """The numbers of each optimizer's steps."""
        return {name: [next(iter(step.values())).index for step in steps] for name, steps in self._steps.items()}

    @cached_property
    def _steps(self) -> Steps:
        joined: dict[str, dict[int, dict[int, Step]]] = {}
        for life in self._lives:
            for name in life.optimizers:
                for step in life.steps(name):
                    joined.setdefault(name, {})[next(iter(step.values())).index] = step
        return {name: [by[k] for k in sorted(by) if self._wants(name, k)] for name, by in joined.items()}

    def _wants(self, optimizer: str, index: int) -> bool:
        return self._only is None or index in self._only.get(optimizer, ())

    def variables(self, when: str) -> dict[tuple[int, int], dict[str, Variable]]:
        """The first life's initial, the last one's final ones."""
        return self._lives[0 if when == "initial" else -1].variables(when)

    @property
    def reports(self) -> list[Report]:
        """None: what a program reports is counted from each start, not by steps."""
        return []
