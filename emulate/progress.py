"""Report the progress of a verification: which run it is at, and which step of it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receive the calls of a verification, from any thread; several runs may be in progress."""

    def expect(self, runs: int) -> None:
        """Set the estimated number of runs. It can be called again."""

    def run_started(self, label: str, steps: int | None) -> None:
        """Report the start of a run. `steps` is the largest number of steps, None for all steps of the program."""

    def step(self, label: str, step: int) -> None:
        """Report that a run has made this many steps."""

    def run_ended(self, label: str, outcome: str) -> None:
        """Report the end of a run. `outcome` is a word or two."""

    def note(self, text: str) -> None:
        """Show a message to the waiting user."""


class Silent:
    """Report nothing."""

    def expect(self, runs: int) -> None:
        """Do nothing."""

    def run_started(self, label: str, steps: int | None) -> None:
        """Do nothing."""

    def step(self, label: str, step: int) -> None:
        """Do nothing."""

    def run_ended(self, label: str, outcome: str) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""
