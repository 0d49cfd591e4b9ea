"""Send work to the workers of a ClusterCoordinator, and receive results. A lost worker's work goes to another worker."""

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
from gpudist_core.upstream import strategies

_RETRY_SECONDS = 0.05
_WORK_AHEAD = 2
"""Items under way for each worker: one in work, one waiting."""


class Workers:
    """Manage the workers of a strategy.

    Args:
        strategy: A `ParameterServerStrategy`.
        timeout_seconds: How long to wait for any result, in seconds; None for no limit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout_seconds: float | None) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.num_workers, self.num_servers = strategies.num_tasks(strategy)
        self.ahead = _WORK_AHEAD * self.num_workers
        self.under_way = 0
        self._timeout = timeout_seconds
        self._bringers = _Bringers(self.ahead)

    def send(self, key: Any, function: Any, args: Sequence[Any]) -> None:
        """Give work to the first free worker. The work must have no side effects: it is repeated if the worker dies.

        Args:
            key: The key of its result.
            function: A concrete function.
            args: Its arguments: tensors of this process.
        """
        self._bringers.bring(self._coordinator.schedule(function, args=tuple(args)), key)
        self.under_way += 1

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield the results that have arrived, at least one, with their keys.

        Yields:
            The key and the result.

        Raises:
            Unavailable: If nothing arrived in time.
        """
        try:
            arrived = [self._bringers.arrived.get(timeout=self._timeout)]
        except queue.Empty:
            raise Unavailable(
                f"A worker must finish its work in time. Received: timeout_seconds={self._timeout}, workers={self.num_workers}"
                ", "
                f"under_way={self.under_way}. Restart the workers, or give them more time."
            ) from None
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._bringers.arrived.get_nowait())
        for key, result, error in arrived:
            self.under_way -= 1
            if error is not None:
                raise error
            yield key, result

    def forget(self) -> None:
        """Drop the work under way, after an error."""
        with contextlib.suppress(Exception):  # the error that led here, which TensorFlow keeps until somebody asks
            self._coordinator.done()
        self.under_way = 0
        self._bringers = _Bringers(self.ahead)


class _Bringers:
    """Wait for results in threads, one for each result that may be under way. The threads are reused.

    Args:
        most: The largest number of threads.

    Attributes:
        arrived: Results in the order of arrival: the key, the result, and the error in its place.
    """

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, 0
        self._awaited: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self.arrived: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()

    def bring(self, remote: Any, key: Any) -> None:
        """Wait for a result.

        Args:
            remote: A `RemoteValue`.
            key: The key of its result.
        """
        self._awaited.put((remote, key))
        if self._threads < self._most:
            self._threads += 1
            # One that waits for a cluster that is gone must not keep the process alive.
            threading.Thread(target=_bring, args=(self._awaited, self.arrived), daemon=True).start()

    def __del__(self) -> None:
        """End each thread once its result has come."""
        for _ in range(self._threads):
            self._awaited.put(None)


def _bring(awaited: queue.SimpleQueue[Any], arrived: queue.SimpleQueue[Any]) -> None:
    while (item := awaited.get()) is not None:
        arrived.put(_brought(*item))
        del item  # it holds the gradients


def _brought(remote: Any, key: Any) -> tuple[Any, Any, BaseException | None]:
    try:
        return key, _result(remote), None
    except BaseException as error:
        return key, None, error


def server_lost(error: BaseException) -> Unavailable | None:
    """Return the error to raise if another error means that a parameter server is lost; None otherwise."""
    gone = (tf.errors.UnavailableError, tf.errors.AbortedError)
    restarted = isinstance(error, tf.errors.OpError) and "context_id" in str(error)
    if "/job:ps" not in str(error) or not (isinstance(error, gone) or restarted):
        return None
    servers = sorted(set(re.findall(r"remote target (/job:ps/[^ ]*task:\d+)", str(error))))
    return Unavailable(
        "A parameter server must stay up: the variables that it held are lost. "
        f"Received: error={type(error).__name__}, servers={servers}. Restart all tasks and continue from the last checkpoint."
    )


def _result(remote: Any) -> Any:
    """Return the result once it is there, or raise the error of the work itself.

    A worker may die when its result is known but not copied yet. TensorFlow repeats the work. Until then, copying raises a new
    error each time, while the error of the work stays the same object.
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
