"""Report the progress of a verification: which run it is at, and which step of it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receive the calls of a verification, from any thread; several runs may be in progress."""

    def expect(self, runs: int) -> None:
        """Set how many runs may follow at most, again and again; 0: any number may, as gpudist looks for causes."""

    def run_started(self, label: str, steps: int | None) -> None:
        """Report the start of a run. `steps` is the largest number of steps, None for all steps of the program."""

    def step(self, label: str, step: int) -> None:
        """Report that a run has made this many steps."""

    def run_ended(self, label: str, outcome: str) -> None:
        """Report the end of a run. `outcome` is a word or two."""


class Silent:
    """Report nothing."""

    def expect(self, *_: object, **__: object) -> None:
        """Do nothing."""

    run_started = step = run_ended = expect
