"""Hold what all runs of a verification have in common, such as the step after which they stop.

If the user leaves it open, this is step 20, extended to the end of the first epoch where that has at most 50 batches and costs
about a minute at most. The first runs (the reference and the first topology, which start together) stop at step 20 and ask;
every later run knows the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from emulate.faults import Fault
from emulate.program import Program
from emulate.recorder import ProbePlan

DEFAULT_STEPS = 20
LONGEST_EPOCH = 50
MOST_SECONDS = 60.0
AUTO: Literal["auto"] = "auto"
Steps = int | Literal["auto"] | None
"""A number of steps, None for all, or `auto` for the default."""


@dataclass(frozen=True)
class Ask:
    """Hold what a run knows at step 20.

    Attributes:
        epoch: The number of batches of the first epoch, None where it is unknown.
        seconds: How long a step takes.
    """

    epoch: int | None
    seconds: float


@dataclass
class StepLimit:
    """Know the last step of all runs.

    Args:
        wanted: What the user asked for.
        voters: So many of the first runs go on at the same time; they decide together.
        num_runs: About so many more runs are made, `voters` at a time.
    """

    wanted: Steps
    voters: int
    num_runs: int = 0
    _asked: dict[str, Ask | None] = field(default_factory=dict)
    _joined: list[str] = field(default_factory=list)
    _decided: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_open(self) -> bool:
        """Return whether the runs that start now have to ask."""
        return self.wanted == AUTO and self._decided is None and len(self._joined) < self.voters

    @property
    def steps(self) -> int | None:
        """Return the last step as far as it is known: the default until it is decided."""
        return (self._decided or DEFAULT_STEPS) if self.wanted == AUTO else self.wanted

    @property
    def looks_from(self) -> int | None:
        """Return the step that every run may have to stop at."""
        return DEFAULT_STEPS if self.wanted == AUTO else self.wanted

    @property
    def decided(self) -> int | None:
        """Return the decision, None while a run that takes part has not come to step 20."""
        with self._lock:
            return self._decided

    def join(self, label: str) -> bool:
        """Take note of a run that starts; return whether it has to ask."""
        with self._lock:
            if self.is_open:
                self._joined.append(label)
            return label in self._joined and self._decided is None

    def ask(self, label: str, ask: Ask) -> None:
        """Take note of a run that has come to step 20."""
        with self._lock:
            self._asked[label] = ask
            self._decide()

    def leave(self, label: str) -> None:
        """Take note that a run is over."""
        with self._lock:
            if label in self._joined:
                self._asked.setdefault(label, None)
                self._decide()

    def _decide(self) -> None:
        if self._decided is not None or len(self._joined) < self.voters or not set(self._joined) <= self._asked.keys():
            return
        asked = [ask for ask in self._asked.values() if ask is not None]
        has_left = len(asked) < len(self._joined)  # one of them ended, or failed, before step 20
        self._decided = DEFAULT_STEPS if has_left else self._end_of_epochs(asked)

    def _end_of_epochs(self, asked: list[Ask]) -> int:
        """Return the step where the runs have made their first epochs: a run with a larger batch has a shorter one."""
        seconds = max(ask.seconds for ask in asked) * -(-self.num_runs // self.voters)
        epochs = [ask.epoch for ask in asked if ask.epoch is not None and DEFAULT_STEPS < ask.epoch <= LONGEST_EPOCH]
        return max((epoch for epoch in epochs if (epoch - DEFAULT_STEPS) * seconds <= MOST_SECONDS), default=DEFAULT_STEPS)


@dataclass(frozen=True)
class Settings:
    """Hold what is equal for all runs of a verification."""

    program: Program
    seed: int = 0
    steps: Steps = AUTO
    timeout: float = 300.0
    device: str = "cpu"
    network: str = "own"
    all_reduce: str = "auto"
    precision: str = "float32"
    tf_config: bool = False
    reference_args: tuple[str, ...] | None = None
    budget: int = ProbePlan.budget
    faults: tuple[Fault, ...] = ()
    restarts: int = 3
    thorough: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
