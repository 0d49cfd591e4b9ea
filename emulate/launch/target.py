"""Define what each scheduler can do for a job, follow the job to its end, and call the scheduler's programs."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from emulate.errors import Unavailable, UsageError
from emulate.launch.job import JobLogs

JOB_FILE = "job.json"
SUCCEEDED, FAILED, TIMED_OUT, CANCELLED = "succeeded", "failed", "timed-out", "cancelled"
_SILENCE = 300.0
"""Seconds after which a scheduler that does not answer is given up: controllers restart, networks fail for a while."""
_END_PATIENCE = 120.0


@dataclass(frozen=True)
class JobState:
    """Describe how far a job is.

    Attributes:
        phase: `waiting`, `running`, `succeeded`, `failed`, `timed-out` or `cancelled`.
        text: What the scheduler says about it.
        code: The exit code of the program after SIGTERM, which is then that of the command.
    """

    phase: str
    text: str = ""
    code: int | None = None

    @property
    def is_over(self) -> bool:
        """Return whether nothing of the job runs."""
        return self.phase not in ("waiting", "running")

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command for this end."""
        return {SUCCEEDED: 0, TIMED_OUT: 4}.get(self.phase, 3) if self.code is None else self.code

    def __str__(self) -> str:
        return f"{self.phase}: {self.text}" if self.text else self.phase


@dataclass(frozen=True)
class HostCommand:
    """Describe what one host runs, for a rehearsal.

    Attributes:
        names: The names under which the other hosts reach it.
        argv: The command.
        environment: What the scheduler sets.
        programs: Scripts for programs that only the scheduler's hosts have, by name.
    """

    names: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)


class Target(Protocol):
    """Define what a scheduler can do for one job."""

    poll: float

    @property
    def text(self) -> str:
        """Return what is submitted, for `--dry-run`."""

    def submit(self) -> dict[str, Any]:
        """Submit the job. Return what finds it again."""

    def state(self) -> JobState:
        """Return how far the job is."""

    def cancel(self) -> bool:
        """End the job, whatever its state. Return False if it was not submitted."""

    def finish(self) -> None:
        """Stop all that this process started."""

    def collect(self) -> None:
        """Copy the trace of a recorded job to this machine, if it is not there."""

    def host_commands(self) -> list[HostCommand]:
        """Return what each host runs."""


def make_folder(folder: Path) -> None:
    """Make the job's folder. Raise UsageError if it has contents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_full = any(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"--folder must be a folder that can be written. Received: --folder {str(folder)!r} ({error.strerror})."
        ) from None
    if is_full:
        raise UsageError(f"--folder must be a new or empty folder. Received: --folder {str(folder)!r}, which has contents.")


def follow(target: Target, folder: Path, say: Callable[[str], None], *, is_detached: bool = False) -> JobState:
    """Submit a job, show its logs, and wait for its end. An interruption ends the job.

    Args:
        target: The scheduler with the job.
        folder: The job's folder.
        say: Called with what the user should know.
        is_detached: Whether to return as soon as the job is submitted.

    Returns:
        The last state.

    Raises:
        Unavailable: If the scheduler refuses the job or stops answering.
    """
    logs, is_submitted = JobLogs(folder), False
    try:
        record = target.submit()
        is_submitted = True
        _write(folder, record)
        say(f"Submitted {record['label']}. Its folder is {folder}")
        if is_detached:
            return JobState("waiting")
        state = _watch(target, logs, say)
        _write_end(folder, state)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not is_submitted:
            is_submitted = not _end(target, folder, say) or is_submitted
        else:  # a scheduler that does not answer is no reason to end a training
            say(f"The job may still run. gpudist launch --status {folder} shows its state, --cancel ends it.")
        raise
    finally:
        target.finish()
        logs.relay(is_last=True)
        if not is_submitted:  # its name and folder are free for the next try
            shutil.rmtree(folder, ignore_errors=True)
    if state.phase == SUCCEEDED:
        target.collect()
    return state


def _watch(target: Target, logs: JobLogs, say: Callable[[str], None]) -> JobState:
    state, answered = JobState("waiting", "not known yet"), time.monotonic()
    while True:
        before = state
        try:
            state, answered = target.state(), time.monotonic()
        except Unavailable:
            if time.monotonic() - answered > _SILENCE:
                raise
        logs.relay()
        if state != before and not state.is_over:
            say(str(state))
        if state.is_over:
            return state
        time.sleep(target.poll)


def _end(target: Target, folder: Path, say: Callable[[str], None]) -> bool:
    """End a job. Return whether it has ended, and say so if it may still run."""
    try:
        if not target.cancel():
            return True
        until = time.monotonic() + _END_PATIENCE
        while not target.state().is_over:
            if time.monotonic() > until:
                raise Unavailable(f"It did not end within {_END_PATIENCE:g} s.")
            time.sleep(target.poll)
        _write_end(folder, JobState(CANCELLED, "by gpudist"))
        return True
    except Unavailable as error:
        say(f"The job may still run: {error} Try again: gpudist launch --cancel {folder}")
        return False


def _write(folder: Path, record: dict[str, Any]) -> None:
    (folder / JOB_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _write_end(folder: Path, state: JobState) -> None:
    if (folder / JOB_FILE).exists():
        _write(folder, read(folder) | {"ended": asdict(state)})


def read(folder: Path) -> dict[str, Any]:
    """Return what finds a job again. Raise UsageError if the folder has no job."""
    try:
        record: dict[str, Any] = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(
            f"JOB must be the folder of a job of gpudist launch, with a {JOB_FILE}. Received: {str(folder)!r}."
        ) from None
    return record


_ANSWER_TIME = 120


def call(*command: str, text: str | None = None) -> str:
    """Run a scheduler's program.

    Args:
        *command: The program and its arguments.
        text: Its standard input.

    Returns:
        Its standard output.

    Raises:
        Unavailable: If it is not installed, or refuses. The text has its own words.
    """
    check_installed(command[:1])
    try:
        # In a session of its own: Ctrl-C is for gpudist, which then asks the scheduler to end the job.
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, timeout=_ANSWER_TIME, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        text = f"{command[0]} must answer. Received: no answer in {_ANSWER_TIME} s from {' '.join(command)}."
        raise Unavailable(text) from None
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split())
        raise Unavailable(f"{command[0]} must succeed. Received: {said} (from {' '.join(command[:4])}).")
    return done.stdout


def check_installed(programs: Sequence[str]) -> None:
    """Raise Unavailable if a program is not on PATH."""
    for program in programs:
        if shutil.which(program) is None:
            raise Unavailable(
                f"This target needs {program}. Received: {program} is not on PATH. "
                "Run gpudist launch where it is installed, or use --dry-run."
            )


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back within: a job that was just submitted must be known before it can be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
