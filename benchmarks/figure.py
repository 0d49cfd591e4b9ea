"""One measured figure: ours beside theirs, as a ratio, against a goal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A figure as benchmarks/results.json has it.

    Attributes:
        value: The ratio or difference that the goal is about.
        goal: What it should reach; None where it is only stated.
        at_least: Whether more is better.
        ours, theirs: The two medians, in `of` (seconds unless told).
        against: What theirs is.
    """

    name: str
    value: float
    goal: float | None
    at_least: bool
    ours: float
    theirs: float
    against: str
    unit: str = "ratio"
    of: str = "s"

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def to_json(self) -> dict[str, Any]:
        """The object of results.json."""
        return {
            "value": round(self.value, 4),
            "unit": self.unit,
            "goal": self.goal,
            "at_least": self.at_least,
            "met": self.met,
            "ours": float(f"{self.ours:.6g}"),  # an example of a pipeline takes microseconds
            "theirs": float(f"{self.theirs:.6g}"),
            "of": self.of,
            "against": self.against,
        }


def seconds(action: Callable[[], Any]) -> float:
    """How long an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turn(ours: Callable[[], float], theirs: Callable[[], float], times: int) -> tuple[float, float]:
    """Medians of two measurements taken in turn, each first as often, so that a machine that slows down slows down both."""
    mine, other = [], []
    for number in range(times):
        sides = [(mine, ours), (other, theirs)]
        for taken, measure in reversed(sides) if number % 2 else sides:
            taken.append(measure())
    return statistics.median(mine), statistics.median(other)
