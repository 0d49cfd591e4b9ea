"""Check whether a program with faults continued to its end, with the same result as without faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from emulate.faults import Fault, Fired, never_fired
from emulate.recorder import ProbePlan
from emulate.told import Told, told
from emulate.trace import Report, Step, Trace, Variable
from emulate.verify.compare import Comparison, compare
from emulate.verify.result import RunResult
from emulate.verify.verdict import FaultReport

Steps = dict[str, list[dict[int, Step]]]


@dataclass
class Lives:
    """Hold the runs from one start of a program to the next.

    Attributes:
        faults: The faults to inject.
        fired: What did.
        runs: How each life went; only the last one can be the program's end.
        in_life: Of each fault that came to pass, by its place in `faults`, in which life.
        held: The step after which the last life was held; None where it was not.
    """

    faults: tuple[Fault, ...]
    fired: list[Fired] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)
    in_life: dict[int, int] = field(default_factory=dict)
    held: int | None = None

    def add(self, run: RunResult, plan: ProbePlan, fired: Sequence[Fired]) -> None:
        """Add a finished run."""
        run.trace, self.held = Trace(plan.trace), plan.steps
        self.runs.append(run)
        self.fired = list(fired)
        for firing in fired:
            self.in_life.setdefault(firing.number, len(self.runs) - 1)

    @property
    def begun(self) -> dict[str, int]:
        """Return how many steps each optimizer had made before the very first start, restored from the folder."""
        first = self.runs[0].trace
        events = first.of("begun") if first is not None else []
        return {str(event["optimizer"]): int(event["step"]) for _, event in events}

    @property
    def last(self) -> RunResult:
        """Return the run in which the program ended, or did not."""
        return self.runs[-1]

    @property
    def restarts(self) -> int:
        """Return how often it was restarted."""
        return len(self.runs) - 1


def _told(life: Trace) -> int:
    """Return after how many steps a restored optimizer continues, 0 without one: its steps are counted from there."""
    return max(_told_by_hosts(life).values(), default=0)


def _told_by_hosts(life: Trace) -> dict[int, int]:
    """Return the same for each host that made a step, if one was restored."""
    if not any(True for _ in life.of("resumed")):
        return {}
    steps = dict.fromkeys((host for host, _ in life.of("initial")), 0)
    for host, event in life.of("resumed"):
        steps[host] = max(steps.get(host, 0), int(event["step"]))
    return steps


def _shift(life: Trace, without: Trace) -> int:
    """Return how many steps come before those of a program that restores no count: found by its weights, or examples."""
    shared = [name for name in life.optimizers if name in without.optimizers]
    if _told(life) or not shared or not life.steps(shared[0]):
        return 0
    steps, begins = without.steps(shared[0]), _rows(life.steps(shared[0])[0])
    begun = _trained(life.variables("initial"))
    by_weights = [k + 1 for k, step in enumerate(steps) if begun and _after(step, begun) == begun]
    by_rows = [k for k, step in enumerate(steps) if begins and _rows(step) == begins]
    for matches in (by_weights, by_rows):
        if len(matches) == 1:
            return matches[0]
    return next((k for k in by_weights if k in by_rows or not by_rows), 0)


def _rows(step: Mapping[int, Step]) -> Counter[str]:
    return Counter(row for local in step.values() for row in local.rows or ())


def _trained(variables: Mapping[tuple[int, int], Mapping[str, Variable]]) -> dict[tuple[int, str], str]:
    """Return the bits of each trained variable, by replica and name."""
    return {
        (replica, name): variable.digest
        for (_, replica), by_name in variables.items()
        for name, variable in by_name.items()
        if variable.trainable
    }


def _after(step: Mapping[int, Step], wanted: Collection[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return the bits after a step, for the wanted variables."""
    return {
        (replica, name): variable.digest
        for replica, local in step.items()
        for name, variable in local.weights.items()
        if (replica, name) in wanted
    }


@dataclass
class Recovery:
    """Compare a program with faults to the same program on the same topology without.

    Args:
        lives: With the faults.
        without: Recorded without them.
    """

    lives: Lives
    without: Trace

    @property
    def missed(self) -> list[Told]:
        """Return the message of each fault that did not occur."""
        there = {firing.number for firing in self.lives.fired}
        return [told("fault-not-fired")(self._missed(fault)) for n, fault in enumerate(self.lives.faults) if n not in there]

    def _missed(self, fault: Fault) -> str:
        ends = [event["reason"] for _, event in self.without.of("end")]
        steps = max(self.lives.begun.values(), default=0) + self.without.num_steps
        if set(ends) != {"returned"} or getattr(fault, "step", 0) <= steps:
            return never_fired(fault, self.lives.held)
        return (
            f"A fault must happen. Received: fault={str(fault)!r}, which did not happen: the program has only {steps} steps. "
            f"Use a step up to {steps}."
        )

    @property
    def has_ended(self) -> bool:
        """Return whether the program ended well."""
        return self.lives.last.status == "ok"

    @cached_property
    def comparison(self) -> Comparison | None:
        """Return the comparison with the run without faults, step by step; None if nothing can be compared."""
        ours = self._joined
        return None if ours is None else compare(JoinedTrace([self.without], only=ours.indices), ours)

    @cached_property
    def _joined(self) -> JoinedTrace | None:
        """Return the traces of all lives as one; None if nothing can be compared."""
        traces = [run.trace for run in self.lives.runs if run.trace is not None]
        if not traces or not self.has_ended:
            return None
        return JoinedTrace(traces, [0, *(_shift(trace, self.without) for trace in traces[1:])])

    @cached_property
    def other_steps(self) -> tuple[str, int, int] | None:
        """Return an optimizer that made other steps until the end, with both numbers of steps."""
        if self._joined is None:
            return None
        ours, theirs = self._joined.indices, JoinedTrace([self.without]).indices
        apart = [name for name in theirs if set(ours.get(name, ())) != set(theirs[name])]
        return (apart[0], len(set(ours.get(apart[0], ()))), len(theirs[apart[0]])) if apart else None

    @cached_property
    def went_on_from(self) -> list[int]:
        """Return, for each restart, after how many steps the program continued, by its optimizer; 0 for a new start."""
        begun = max(self.lives.begun.values(), default=0)
        return [begun + step for step in self._went_on_from]

    @cached_property
    def _went_on_from(self) -> list[int]:
        """Return the same, counted from the program's very first start."""
        return [_told(life) or _shift(life, self.without) for life in self._later]

    @property
    def _later(self) -> list[Trace]:
        return [run.trace for run in self.lives.runs[1:] if run.trace is not None]

    @cached_property
    def at_odds(self) -> dict[int, int]:
        """Return the steps from which the hosts continued in the first restart where they differ; empty without one."""
        begun = max(self.lives.begun.values(), default=0)
        for life in self._later:
            resumed = _told_by_hosts(life)
            if len(set(resumed.values())) > 1:
                return {host: begun + step for host, step in sorted(resumed.items())}
        return {}

    def restarts_of(self, number: int) -> list[int]:
        """Return the restarts that came from a fault: those until another fault occurred.

        Of faults of one life those that end a host or its link for good have its restarts, where there are any.
        """
        life = self.lives.in_life.get(number)
        together = {other: self.lives.faults[other].is_final for other, its in self.lives.in_life.items() if its == life}
        if life is None or (any(together.values()) and not together[number]):
            return []
        until = min((later for later in self.lives.in_life.values() if later > life), default=self.lives.restarts)
        return list(range(life, min(until, self.lives.restarts)))

    @cached_property
    def not_restored(self) -> dict[str, set[int]]:
        """Return trained variables that had their initial values when the program resumed, with their hosts."""
        unrestored: dict[str, set[int]] = {}
        first, *later = [run.trace for run in self.lives.runs if run.trace is not None]
        for life, step in zip(later, self._went_on_from, strict=True):
            for optimizer in life.optimizers if step else ():
                previous = self.without.steps(optimizer)[step - 1 : step]
                begun, anew = _trained(first.variables("initial")), _trained(life.variables("initial"))
                expected = _after(previous[0], anew) if previous else {}
                hosts = {replica: host for host, replica in life.variables("initial")}
                for place, digest in anew.items():
                    if digest == begun.get(place) and digest != expected.get(place, digest):
                        unrestored.setdefault(place[1], set()).add(hosts[place[0]])
        return unrestored

    @property
    def result(self) -> str | None:
        """Return `identical` (bit for bit), `within-noise`, `different`, or None if it is unknown."""
        comparison = self.comparison
        if self.other_steps is not None:
            return "different"
        if comparison is None or not comparison.points:
            return None
        if comparison.exceeding:
            return "different"
        return "identical" if all(point.measure.error == 0 for point in comparison.points) else "within-noise"

    def reports(self) -> tuple[FaultReport, ...]:
        """Return one report for each fault."""
        return tuple(self._report(number, fault) for number, fault in enumerate(self.lives.faults))

    def _report(self, number: int, fault: Fault) -> FaultReport:
        fired = next((firing for firing in self.lives.fired if firing.number == number), None)
        worst = self.comparison.worst if self.comparison is not None else None
        restarts = self.restarts_of(number)
        return FaultReport(
            fault=str(fault),
            fired=fired is not None,
            host=getattr(fault, "host", None),
            step=fired.step if fired is not None else getattr(fault, "step", None),
            phase=getattr(fault, "phase", None),
            recovered=self.has_ended if fired is not None else None,
            restarts=len(restarts),
            went_on_from=tuple(self.went_on_from[at] for at in restarts if at < len(self.went_on_from)),
            result=self.result if fired is not None else None,
            error=worst.error if worst is not None and fired is not None else None,
        )


class JoinedTrace(Trace):
    """Join the traces of all restarts of one program: of a repeated step the later one counts.

    Args:
        lives: Their traces, in order.
        shifts: Of each how many steps lie before its own; none unless given.
        only: Of each optimizer the numbers of the steps that are wanted; all unless given.
    """

    def __init__(
        self, lives: Sequence[Trace], shifts: Sequence[int] = (), *, only: Mapping[str, Collection[int]] | None = None
    ) -> None:
        super().__init__(lives[-1].directory)
        self._lives = lives
        self._shifts = shifts or [0] * len(lives)
        self._only = only

    @property
    def indices(self) -> dict[str, list[int]]:
        """Return the numbers of each optimizer's steps."""
        return {name: [next(iter(step.values())).index for step in steps] for name, steps in self._steps.items()}

    @cached_property
    def _steps(self) -> Steps:
        joined: dict[str, dict[int, dict[int, Step]]] = {}
        for life, shift in zip(self._lives, self._shifts, strict=True):
            for name in life.optimizers:
                for step in life.steps(name):
                    index = next(iter(step.values())).index + shift
                    joined.setdefault(name, {})[index] = {r: replace(local, index=index) for r, local in step.items()}
        return {
            name: [by[k] for k in sorted(by) if self._only is None or k in self._only.get(name, ())]
            for name, by in joined.items()
        }

    def variables(self, when: str) -> dict[tuple[int, int], dict[str, Variable]]:
        """Return the first run's initial variables, or the last one's final ones."""
        return self._lives[0 if when == "initial" else -1].variables(when)

    @property
    def reports(self) -> list[Report]:
        """Return no reports: the program's reports are counted from each start, not by steps."""
        return []
