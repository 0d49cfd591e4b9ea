"""Describe how a job ended on one host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emulate.cluster import RemoteError


@dataclass
class HostResult:
    """Describe how a job ended on one host.

    Attributes:
        host: The host's number.
        status: `returned`; `raised`; `exited` (`sys.exit`, or the process left by itself); `killed` (by a signal; `code` is
            minus its number); `ended` (by the pool, because another host has failed); `timeout` (ended because the job's time
            had passed); `waiting` (ended because it waited forever for a host that had finished).
        value: The function's result.
        error: The exception that it raised.
        code: The exit code, if the host left or was killed.
        stack: Where the host was when it was ended or crashed, outermost call first.
        output: The host's standard output and standard error during the job, in the order of writing.
        step: The last `step` among the events that it sent, or None.
    """

    host: int
    status: str
    value: Any = None
    error: RemoteError | None = None
    code: int | None = None
    stack: str = ""
    output: str = ""
    step: int | None = None
