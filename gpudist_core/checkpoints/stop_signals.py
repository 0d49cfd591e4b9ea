"""Handle the signals that tell a run to stop."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpudist_core.checkpoints.agreement import HostAgreement, quietly
from gpudist_core.errors import UsageError

# A second signal of the same kind sooner than this is the same notice (schedulers signal every process of a tree).
_SAME_NOTICE = 5.0


class Notice:
    """Watch for signals, on behalf of all hosts.

    Args:
        names: The signals, for example `SIGTERM`.
        agreement: How the hosts agree on a step; None with one host.

    Raises:
        UsageError: Outside of the main thread.
    """

    def __init__(self, names: Sequence[str], agreement: HostAgreement | None) -> None:
        self._agreement = agreement
        self._received: int | None = None
        self._since = 0.0
        self._honoured = False
        # A signal handler may run while any lock is held: of all queues only this one may be used there.
        self._notices: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}
        self._passed_on: dict[int, Any] = {}
        numbers = [int(signal.Signals[name]) for name in names]
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Signals can be watched from the main thread only",
                "Train there, or leave the signals to the rest of the program: signals=().",
                thread=threading.current_thread().name,
            )
        if agreement is not None and numbers:
            self._thread = threading.Thread(target=self._announce, name="checkpoints: notice of a signal", daemon=True)
            self._thread.start()
        # TensorFlow's server for MultiWorkerMirroredStrategy installs its own notifier for SIGTERM, and the process lives on. A
        # handler that is installed later, as here, gets the signal instead.
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)

    def is_time(self, call: int) -> bool:
        """Return whether to save and stop now.

        Args:
            call: The number of this call.

        Returns:
            The answer, equal on all hosts.
        """
        stop = self._received is not None if self._agreement is None else self._agreement.is_time(call)
        self._honoured = self._honoured or stop
        return stop

    def close(self) -> None:
        """Restore the signal handlers. A signal that came too late to stop the training is delivered again."""
        if self._agreement is not None:
            self._agreement.close()
        if self._thread is not None:
            self._notices.put(False)
            self._thread.join()
            self._thread = None
        self._give_back()
        if self._received is not None and not self._honoured:
            self._honoured = True
            os.kill(os.getpid(), self._received)

    def _give_back(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            handler = signal.SIG_DFL if handler is None else handler
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
            else:  # somebody else has it now, and may give it back to this one
                self._passed_on[number] = handler

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number in self._passed_on:
            signal.signal(number, self._passed_on[number])
            os.kill(os.getpid(), number)
        elif self._received is None:
            self._received, self._since = number, now
            self._notices.put(True)
        elif now - self._since > _SAME_NOTICE:  # whoever asks again wants it now
            self._give_back()
            os.kill(os.getpid(), number)

    def _announce(self) -> None:
        assert self._agreement is not None
        if self._notices.get():
            quietly(self._agreement.ask)
