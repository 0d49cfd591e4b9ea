"""Carry out each fault in the host, from inside its process."""

from __future__ import annotations

import os
import signal
import threading
import time

from emulate.faults import disk
from emulate.faults.board import Board
from emulate.faults.values import AtStep, Disconnect, FillDisk, Kill, Preempt, Slow, Stop


def inject(fault: AtStep, host: int, board: Board) -> None:
    """Let a fault that comes to pass once do so; of one that kills there is no return."""
    if isinstance(fault, Kill):
        os.kill(os.getpid(), signal.SIGKILL)
    elif isinstance(fault, Stop):  # whoever supervises lets it go on
        os.kill(os.getpid(), signal.SIGSTOP)
    elif isinstance(fault, Preempt):
        _kill_after(fault.seconds)
        os.kill(os.getpid(), signal.SIGTERM)
    elif isinstance(fault, Disconnect):
        board.disconnect(host, fault.seconds)
    elif isinstance(fault, FillDisk):
        disk.fill()


def _kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


class Slowness:
    """Slow down each step of a host.

    Args:
        fault: By how much.
    """

    def __init__(self, fault: Slow) -> None:
        self._fault = fault
        self._step = 0
        self._last: float | None = None

    def slow_down(self, step: int) -> None:
        """Wait, once a step."""
        if step <= self._step:
            return
        self._step = step
        time.sleep(self._pause(time.monotonic()))
        self._last = time.monotonic()

    def _pause(self, now: float) -> float:
        if self._fault.seconds is not None:
            return self._fault.seconds
        assert self._fault.factor is not None
        return 0.0 if self._last is None else (self._fault.factor - 1) * (now - self._last)
