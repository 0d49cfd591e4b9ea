"""Work sent to the workers of a ClusterCoordinator, and its results; a lost worker's work goes to another."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from gpudist_core.errors import Unavailable
from gpudist_core.upstream import coordination

_RETRY_SECONDS = 0.05
_WORK_AHEAD = 2
"""Items under way for each worker: one that it works on, one that waits for it."""


class Workers:
    """The workers of a strategy.

    Args:
        strategy: A `ParameterServerStrategy`.
        timeout_seconds: How long to wait for any result; None to wait for ever.
    """

    def __init__(self, strategy: Any, timeout_seconds: float | None) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.num_workers, self.num_servers = coordination.num_tasks(strategy)
        self.ahead = _WORK_AHEAD * self.num_workers
        self.under_way = 0
        self._timeout = timeout_seconds
        self._arrived: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()

    def send(self, key: Any, function: Any, args: Sequence[Any]) -> None:
        """Give work to whichever worker is free first; it must leave no trace, as it is done again when the worker dies.

        Args:
            key: What its result is known by.
            function: A concrete function.
            args: Its arguments: tensors of this process.
        """
        remote = self._coordinator.schedule(function, args=tuple(args))
        # A thread that waits for a cluster that is gone must not keep the process alive.
        threading.Thread(target=_bring, args=(remote, key, self._arrived), daemon=True).start()
        self.under_way += 1

    def results(self) -> Iterator[tuple[Any, Any]]:
        """What has arrived, at least one, with its key.

        Yields:
            The key and the result.

        Raises:
            Unavailable: When nothing arrived in time.
        """
        try:
            arrived = [self._arrived.get(timeout=self._timeout)]
        except queue.Empty:
            raise Unavailable(
                f"A worker must finish its work in time. Received: timeout_seconds={self._timeout}, workers={self.num_workers}"
                ", "
                f"under_way={self.under_way}. Restart the workers, or give them more time."
            ) from None
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._arrived.get_nowait())
        for key, result, error in arrived:
            self.under_way -= 1
            if error is not None:
                raise error
            yield key, result

    def forget(self) -> None:
        """Drop what is under way, after an error of the work."""
        with contextlib.suppress(Exception):  # the error that led here, which TensorFlow keeps until somebody asks
            self._coordinator.done()
        self.under_way = 0
        self._arrived = queue.SimpleQueue()


def server_lost(error: BaseException) -> Unavailable | None:
    """What to tell when an error means that a parameter server is gone; None for another error."""
    gone = (tf.errors.UnavailableError, tf.errors.AbortedError)
    restarted = isinstance(error, tf.errors.OpError) and "context_id" in str(error)
    if "/job:ps" not in str(error) or not (isinstance(error, gone) or restarted):
        return None
    servers = sorted(set(re.findall(r"remote target (/job:ps/[^ ]*task:\d+)", str(error))))
    return Unavailable(
        "A parameter server must stay up: the variables that it held are lost. "
        f"Received: error={type(error).__name__}, servers={servers}. Restart all tasks and go on from the last checkpoint."
    )


def _bring(remote: Any, key: Any, arrived: queue.SimpleQueue[Any]) -> None:
    try:
        arrived.put((key, _result(remote), None))
    except BaseException as error:
        arrived.put((key, None, error))


def _result(remote: Any) -> Any:
    """The result, once it is there; or the error of the work itself.

    A worker may die when its result is known but not copied yet. TensorFlow does the work again; until it has, copying raises
    another error each time, while the error of the work stays the same object.
    """
    last: BaseException | None = None
    while True:
        try:
            return remote.get()
        except tf.errors.OpError as error:
            if error is last:
                raise
            last = error
            time.sleep(_RETRY_SECONDS)
