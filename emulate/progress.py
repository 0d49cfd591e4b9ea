"""What a verification tells while it runs: which run it is at, and which step of it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a verification calls, from any thread; several runs may be going on at once."""

    def expect(self, runs: int) -> None:
        """About so many runs are made in all; called again when more is known."""

    def run_started(self, label: str, steps: int | None) -> None:
        """A run begins. `steps` is how many it makes at most, None for as many as the program has."""

    def step(self, label: str, step: int) -> None:
        """A run has made this many steps."""

    def run_ended(self, label: str, outcome: str) -> None:
        """A run is over; `outcome` is a word or two."""

    def note(self, text: str) -> None:
        """Something the user should know while waiting."""


class Silent:
    """Tells nothing."""

    def expect(self, runs: int) -> None:
        """Nothing."""

    def run_started(self, label: str, steps: int | None) -> None:
        """Nothing."""

    def step(self, label: str, step: int) -> None:
        """Nothing."""

    def run_ended(self, label: str, outcome: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
