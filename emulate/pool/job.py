"""Define the pool's messages to a warm host, and the host's answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Describe one job, as each host of a cluster gets it.

    Attributes:
        number: Counts the jobs of the cluster.
        call: A file with the pickled function and its arguments.
        cwd: The working directory of the caller.
        search_path: Where the caller imports from.
        resets: Whether the host undoes afterwards what `Reset` undoes. Otherwise the function takes care of it.
    """

    number: int
    call: Path
    cwd: Path
    search_path: tuple[str, ...]
    resets: bool


@dataclass(frozen=True)
class Renew:
    """Ask for new collectives for the next job. It is sent in place of a job.

    Attributes:
        first_key: From where on the next strategy of several hosts counts its groups: the same on every host.
    """

    first_key: int


# Events of a warm host, beside those that its job sends.
DONE = "job-done"  # status, pickled, error, code
IDLE = "job-idle"  # first_key, from where on the host's next strategy counts
NEEDS_PROCESS = "needs-fresh-process"  # the job sets what TensorFlow has read when it was imported
OUTPUT = "output"  # the file in a host's folder that has both its streams
