"""Write in the background: one checkpoint at a time, with its failure reported at the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Run one action at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, act: Callable[[], Any]) -> None:
        """Start an action. The previous one must be over (`join`)."""
        assert self._thread is None

        def run() -> None:
            try:
                act()
            except BaseException as error:  # told by whoever joins
                self._failure = error

        # Not a daemon: a process that ends by itself ends after its last checkpoint.
        self._thread = threading.Thread(target=run, name="checkpoints: writing")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether an action was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> BaseException | None:
        """Wait for the action, and return its exception once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure
