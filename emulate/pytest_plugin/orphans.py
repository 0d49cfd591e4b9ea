"""End a worker of pytest-xdist and its hosts when its pytest was killed."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

_POLL_SECONDS = 0.25


@functools.cache
def end_with_parent() -> None:
    """Interrupt this process, as Ctrl-C does, when the one that started it is gone.

    Execnet does so too, 5 seconds later, as it waits for tests to end by themselves; hosts would work on until then.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), name="gpudist-orphans", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
