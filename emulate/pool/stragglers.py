"""Detect hosts that wait forever for a host that has finished its job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from emulate.cluster import Thread, waits_for

_BUSY = 0.05  # of one processor
_ENDLESS = ("tensorflow", "lock")  # a thread in TensorFlow there is in any case: locks alone may have a time limit


class LateCluster(Protocol):
    """Define what the check asks a cluster."""

    def cpu_seconds(self, host: int) -> float:
        """Return the processor time that the host has used."""

    def is_runnable(self, host: int) -> bool:
        """Return whether a thread of the host can run."""

    def threads(self) -> dict[int, list[Thread]]:
        """Return what the threads of each host do."""


class Stragglers:
    """Check whether unfinished hosts can never finish, because they wait for finished ones.

    Args:
        cluster: Whose hosts.
        patience: Seconds for which they have done nothing; nobody can know a wait to be for ever.
        clock: The time in seconds.
    """

    def __init__(self, cluster: LateCluster, patience: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._patience = patience
        self._clock = clock
        self._pending: list[int] = []
        self._since = 0.0
        self._used: list[float] = []

    def are_lost(self, pending: list[int], num_hosts: int) -> bool:
        """Return whether this is so now. Call it several times a second.

        Args:
            pending: The hosts that are not done.
            num_hosts: How many run the job.

        Returns:
            Whether they wait in TensorFlow, and have done nothing for some seconds.
        """
        if not pending or len(pending) == num_hosts:
            return False
        now = self._clock()
        if pending != self._pending:
            self._begin(pending, now)
        if now - self._since < self._patience:
            return False
        is_idle = all(used < _BUSY * (now - self._since) for used in self._worked())
        if is_idle and not any(self._cluster.is_runnable(host) for host in pending):
            threads = self._cluster.threads()
            if all(_waits_in_tensorflow(threads.get(host, [])) for host in pending):
                return True
        self._begin(pending, now)
        return False

    def _begin(self, pending: list[int], now: float) -> None:
        self._pending, self._since = list(pending), now
        self._used = [self._cluster.cpu_seconds(host) for host in pending]

    def _worked(self) -> list[float]:
        now = (self._cluster.cpu_seconds(host) for host in self._pending)
        return [after - before for after, before in zip(now, self._used, strict=True)]


def _waits_in_tensorflow(threads: list[Thread]) -> bool:
    return waits_for(threads) in _ENDLESS and any(thread.waits_for == "tensorflow" for thread in threads)
