"""Handle Ctrl-C pressed twice, or held down: the first ends the command, the others do not end its clean-up."""

from __future__ import annotations

import signal
import time
from typing import Any

_CLEANING_UP = 3.0
"""Seconds after a Ctrl-C in which another one is the same: longer than hosts take to end, shorter than anybody's patience."""


def hear_one_at_a_time() -> None:
    """Raise KeyboardInterrupt for the first Ctrl-C of several; nothing is changed where Ctrl-C is ignored (`nohup`)."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    heard = float("-inf")

    def interrupt(_: int, __: Any) -> None:
        nonlocal heard
        before, heard = heard, time.monotonic()
        if heard - before > _CLEANING_UP:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def hear_no_more() -> None:
    """Leave the interpreter in peace: it waits for threads, and ends hosts, after the command is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
