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
        status: `returned`; `raised`; `exited` (`sys.exit`, or the process left by itself); `killed` (by a signal, `code` is
            minus its number); `ended` (by the pool, because another host was done for); `timeout` (ended because the
            job's time had passed); `waiting` (ended because it waited, without end, for a host that was done).
        value: What the function returned.
        error: What it raised.
        code: The exit code, where the host left or was killed.
        stack: Where the host was when it was ended, or when a fault of its process ended it, outermost call first.
        output: What the host wrote to its standard output and standard error during the job, in that order of writing.
        step: The last `step` among the events that it sent, None when it sent none.
    """

    host: int
    status: str
    value: Any = None
    error: RemoteError | None = None
    code: int | None = None
    stack: str = ""
    output: str = ""
    step: int | None = None
