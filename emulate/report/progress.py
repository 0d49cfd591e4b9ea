"""Show progress: live on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from emulate.progress import Progress
from emulate.told import counted

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_SHOWN_ENDED = 6  # a verification of many topologies makes dozens of runs: they must fit on a screen


class _Count:
    """Number the runs: `run 3 of at most 7`, then `run 8, looking for causes`. A run that is tried again keeps its number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._bound = ""

    def expect(self, runs: int) -> None:
        """Take note of how many runs may follow at most; 0 where that is open."""
        with self._lock:
            self._bound = f" of at most {len(self._numbers) + runs}" if runs else ", looking for causes"

    def _number(self, label: str) -> str:
        """Return the number of a run that begins, in words."""
        return f"run {self._numbers.setdefault(label, len(self._numbers) + 1)}{self._bound}"


class PlainProgress(_Count):
    """Report in plain lines, for logs, when a run starts and ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._steps: dict[str, int] = {}
        self._started: dict[str, float] = {}

    def run_started(self, label: str, steps: int | None) -> None:
        """Print that it begins."""
        self._started[label] = time.monotonic()
        with self._lock:
            number = self._number(label)
        self._print(f"{number}: {label}")

    def step(self, label: str, step: int) -> None:
        """Store the step without output."""
        self._steps[label] = step

    def run_ended(self, label: str, outcome: str) -> None:
        """Print how it ended, after how many steps and seconds."""
        seconds = time.monotonic() - self._started.get(label, time.monotonic())
        steps = self._steps.get(label)
        self._print(f"{label}: {outcome}" + (f", {counted(steps, 'step')}" if steps else "") + f", {seconds:.1f} s")

    def _print(self, text: str) -> None:
        with self._lock:
            print(text, file=self._stream, flush=True)


class LiveProgress(_Count):
    """Report on a terminal: one line for each run, with its step and seconds."""

    def __init__(self, display: RichProgress) -> None:
        super().__init__()
        self._display = display
        self._tasks: dict[str, TaskID] = {}
        self._ended: list[TaskID] = []

    def run_started(self, label: str, steps: int | None) -> None:
        """Add its line."""
        with self._lock:
            self._tasks[label] = self._display.add_task(f"{label} ({self._number(label)})", total=steps, count="starting")

    def step(self, label: str, step: int) -> None:
        """Move its line on."""
        with self._lock:
            task = self._tasks[label]
            total = self._display.tasks[self._display.task_ids.index(task)].total
            count = f"step {step} of {total:.0f}" if total and step <= total else f"step {step}"
            self._display.update(task, completed=step, count=count)

    def run_ended(self, label: str, outcome: str) -> None:
        """Stop its clock and show the outcome."""
        with self._lock:
            task = self._tasks[label]
            self._display.update(task, count=outcome, total=1, completed=1)
            self._display.stop_task(task)
            self._ended.append(task)
            for older in self._ended[:-_SHOWN_ENDED]:
                self._display.update(older, visible=False)


@contextmanager
def progress_on(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress on this stream (default: standard error): live on a terminal, plain lines elsewhere."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(finished_text="·"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=Console(file=stream), transient=True, refresh_per_second=8) as display:
        yield LiveProgress(display)
