"""Writing beside the training: one checkpoint at a time, its failure told at the next opportunity."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """A thread that does one thing at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, act: Callable[[], Any]) -> None:
        """Begin; what was begun before must be over (`join`)."""
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
        """Whether something was begun and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> BaseException | None:
        """Wait for what was begun; returns how it failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure
