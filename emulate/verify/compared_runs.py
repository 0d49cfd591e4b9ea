"""Hold the traces of one comparison, and the steps that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from emulate.probe.facts import Facts
from emulate.probe.trace import Trace
from emulate.verify.aggregation import aggregation
from emulate.verify.gradients import StepOfAll
from emulate.verify.precision import Short, computed_in


@dataclass(frozen=True)
class Runs:
    """Hold the traces of one comparison.

    Attributes:
        source: The reference with steps of its own, where `reference` is led step by step by the run that is judged.
        reported: Runs of the program itself, at the topology's weights or rounded otherwise: what it reports once in many steps
            no evaluated step shows.
    """

    reference: Trace
    topology: Trace
    noise: Sequence[Trace]
    confirmation: Sequence[Trace] = ()
    source: Trace | None = None
    reported: Sequence[Trace] = ()

    @cached_property
    def as_they_came(self) -> Runs:
        """Return the runs with the reference that led itself: for what the program starts with, reports and ends with."""
        return self if self.source is None else replace(self, reference=self.source, noise=(), confirmation=(), source=None)

    @property
    def others(self) -> list[Trace]:
        """Return the noise runs and then the confirming runs."""
        return [*self.noise, *self.confirmation]

    def pairs(self, optimizer: str) -> list[tuple[StepOfAll, StepOfAll]]:
        """Complete steps that both runs have, in order: (topology, reference)."""
        return list(zip(complete(self.topology, optimizer), complete(self.reference, optimizer), strict=False))

    @cached_property
    def computed(self) -> tuple[Short, ...]:
        """Return the 16-bit precisions that the program computes in."""
        return computed_in(self.reference)

    @cached_property
    def of_first(self) -> list[str]:
        """Return scalars that a step assigns and that have the value of the first replica."""
        return Facts.of(self.reference, self.topology).of_first

    def batches(self, optimizer: str) -> tuple[int, int]:
        """Return how many batches a step applies together, in topology and reference; 1 and 1 if that varies."""
        counts = {(_batches(ours), _batches(theirs)) for ours, theirs in self.pairs(optimizer)}
        return counts.pop() if len(counts) == 1 else (1, 1)

    def how(self, optimizer: str) -> str:
        """Return how one gradient is made of the replicas': `sum` or `mean`."""
        return aggregation(self.topology, self.reference, optimizer)

    @property
    def optimizers(self) -> list[str]:
        """Return the optimizers that both runs have."""
        return [name for name in self.reference.optimizers if name in self.topology.optimizers]


def complete(trace: Trace, optimizer: str) -> list[StepOfAll]:
    """Return an optimizer's steps without those at the end that lack replicas (a host was ended in the middle)."""
    steps: list[StepOfAll] = list(trace.steps(optimizer))
    while steps and len(steps[-1]) < len(steps[0]):
        steps.pop()
    return steps


def _batches(step: StepOfAll) -> int:
    return max(local.runs for local in step.values())


def as_many_steps(runs: Runs) -> bool:
    """Return whether both runs made equally many steps of each optimizer."""
    return all(len(complete(runs.topology, name)) == len(complete(runs.reference, name)) for name in runs.optimizers)
