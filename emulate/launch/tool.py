"""Call the programs of a scheduler: sbatch, scontrol, kubectl."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence

from emulate.errors import Unavailable

_PATIENCE = 120


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
            command, input=text or "", capture_output=True, text=True, timeout=_PATIENCE, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} must answer. Received: no answer in {_PATIENCE} s from {' '.join(command)}.") from None
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
