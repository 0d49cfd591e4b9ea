"""Let a job set something up for later jobs of the same host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from emulate.errors import UsageError
from emulate.pool.state import HostState
from emulate.pool.upstream import runtime

state: HostState | None = None  # of this process, when it is a warm host


def keep_meeting() -> None:
    """Keep the collectives of a strategy that was made only to connect the hosts of this job.

    The next one of the job does not start the collectives anew, which would need another meeting.
    """
    runtime.keep_collectives()


@contextlib.contextmanager
def before_runtime(action: Callable[[], None]) -> Iterator[None]:
    """Run an action before TensorFlow's runtime starts, and only if something starts it.

    Args:
        action: Called before the first operation within, if there is one.
    """
    with runtime.before_start(action):
        yield


def keep_state() -> None:
    """Make what is there now (environment, threads, open files, ...) part of this host: later checks compare with it.

    To be called on a host, by a job that sets up what later jobs shall find, before the part of it whose traces shall not stay.

    Raises:
        UsageError: In a process that is no warm host.
    """
    _of_this_host("keep_state", "keeps state for later jobs").keep()


def restore_state() -> None:
    """Undo what the job has changed so far; what cannot be undone is told when the job is over.

    Raises:
        UsageError: In a process that is no warm host.
    """
    _of_this_host("restore_state", "puts its state back").restore_early()


def _of_this_host(call: str, does: str) -> HostState:
    if state is None:
        raise UsageError(
            f"Only a warm host {does}. Received: a call of {call}() in another process. "
            "Call it in a function that runs through Lease.run."
        )
    return state
