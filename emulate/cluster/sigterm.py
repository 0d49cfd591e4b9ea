"""Collect the first SIGTERM of a command, which hands it on to the hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

_SAME_NOTICE = 1.0
"""Seconds in which another SIGTERM is the same: a wrapper and a scheduler may both send it."""


@contextlib.contextmanager
def first_sigterm() -> Iterator[list[float]]:
    """Yield a list that gets the time of the first SIGTERM. A later one ends this process at once, as if nobody heard it."""
    heard: list[float] = []

    def hear(number: int, _: Any) -> None:
        if not heard:
            heard.append(time.monotonic())
        elif time.monotonic() - heard[0] > _SAME_NOTICE:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)
