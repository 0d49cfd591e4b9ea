"""Run one job on all hosts of a cluster, from the start to the last result.

Hosts that wait forever for a host that has finished its job are detected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from emulate.cluster import RemoteError, Thread, waits_for
from emulate.pool.loop import DONE, IDLE, NEEDS_PROCESS
from emulate.pool.warm import WarmCluster

_SLICE = 0.1
_AFTER_KILL = 1.0  # seconds of grace at most: what the others say then is of little interest, and the user waits

_UNFIT = {
    "timeout": "a job took too long",
    "ended": "hosts were ended during a job",
    "waiting": "hosts waited for one that was done with their job",
}


class NeedsBareClusterError(Exception):
    """Report that the job sets what TensorFlow reads at its import, and needs hosts that have not imported it."""

    def __init__(self, reason: str, host: int) -> None:
        super().__init__(reason)
        self.host = host


class Round:
    """Watch a job that was started on a cluster.

    Args:
        cluster: Where it runs.
        timeout: Seconds after which all are ended; None for as long as it takes.
        grace: Seconds that the others get when one host is done for.
        on_event: Called with each event of the job.
        note: Called with what the user should know.
        patience: Seconds that a host may wait, doing nothing, when another one is done; None for as long as it takes.
    """

    def __init__(
        self,
        cluster: WarmCluster,
        timeout: float | None,
        grace: float,
        on_event: Callable[[int, dict[str, Any]], None],
        note: Callable[[str], None],
        patience: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._grace = grace
        self._on_event = on_event
        self._note = note
        self._results: dict[int, HostResult] = {}
        self._steps: dict[int, int] = {}
        self._deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        self._cut = math.inf
        with_servers = cluster.topology.num_ps > 0  # where hosts that are done go on serving
        self._stragglers = None if patience is None or with_servers else Stragglers(cluster.running, patience)

    def hurry(self, grace: float | None = None) -> None:
        """Give the unfinished hosts only this many more seconds. If all finish in time, the cluster stays."""
        self._shorten(self._grace if grace is None else min(grace, self._grace))

    def allow(self, seconds: float) -> None:
        """End the job this many seconds from now."""
        self._deadline = time.monotonic() + seconds

    def _shorten(self, grace: float) -> None:
        self._cut = min(self._cut, time.monotonic() + grace)

    def results(self) -> list[HostResult]:
        """Wait for all.

        Returns:
            The result of each host.

        Raises:
            NeedsBareClusterError: When the job cannot run on this cluster.
        """
        while self._pending():
            until = min(self._deadline, self._cut) - time.monotonic()
            for host, event in self._cluster.events(min(_SLICE, max(0.0, until))):
                self._take(host, event)
            if self._pending() and time.monotonic() >= min(self._deadline, self._cut):
                self._end_rest("ended" if self._cut <= self._deadline else "timeout")
            elif self._are_lost():
                self._end_rest("waiting")
        return [self._results[host] for host in self._cluster.hosts]

    def _are_lost(self) -> bool:
        if self._stragglers is None or self._cut < math.inf:  # then they have their grace
            return False
        return self._stragglers.are_lost(self._pending(), len(self._cluster.hosts))

    def _pending(self) -> list[int]:
        return [host for host in self._cluster.hosts if host not in self._results]

    def _take(self, host: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == DONE:
            self._done(host, event)
        elif kind == "exit":
            self._left(host, event)
        elif kind == "note":
            self._note(event["text"])
        elif kind == NEEDS_PROCESS:
            raise NeedsBareClusterError(f"the job sets {event['name']}, which TensorFlow reads when it is imported", host)
        elif kind not in (IDLE, "started"):
            if isinstance(event.get("step"), int):
                self._steps[host] = event["step"]
            self._on_event(host, event)

    def _done(self, host: int, event: dict[str, Any]) -> None:
        result = HostResult(host, event["status"], error=event.get("error"), code=event.get("code"))
        if event.get("pickled") is not None:
            _load(result, event["pickled"])
        self._add(result)
        if result.status != "returned":
            self.hurry() if len(self._cluster.hosts) > 1 else None
        elif self._cluster.running.roles[host] == "chief":
            self._shorten(self._grace)

    def _left(self, host: int, event: dict[str, Any]) -> None:
        if host not in self._results:
            outcome = next(outcome for outcome in self._cluster.running.outcomes if outcome.host == host)
            self._add(HostResult(host, outcome.status, code=outcome.code, stack=outcome.stack))
        self.hurry(_AFTER_KILL)
        self._on_event(host, event)

    def _end_rest(self, status: str) -> None:
        self._cluster.reject(_UNFIT[status])
        stacks = self._cluster.running.stacks()
        for host in self._pending():
            self._add(HostResult(host, status, stack=stacks.get(host, "")))
        self._cluster.running.end()

    def _add(self, result: HostResult) -> None:
        result.output = self._cluster.output(result.host)
        result.step = self._steps.get(result.host)
        self._results[result.host] = result


def _load(result: HostResult, pickled: bytes) -> None:
    import pickle

    try:
        result.value = pickle.loads(pickled)
    except Exception as error:  # a class that only the host knows
        result.status = "raised"
        said = f"{type(error).__name__}: {error}"
        text = f"The process that submits a job must be able to unpickle what it returns. Received: {said}."
        result.error = RemoteError("TypeError", f"{text} Return numbers, NumPy arrays and containers of them.", "")


@dataclass
class HostResult:
    """Describe how a job ended on one host.

    Attributes:
        host: The host's number.
        status: `returned`; `raised`; `exited` (`sys.exit`, or the process left by itself); `killed` (by a signal; `code` is
            minus its number); `ended` (by the pool, because another host has failed); `timeout` (ended because the job's time
            had passed); `waiting` (ended because it waited forever for a host that had finished).
        value: The function's result.
        error: The exception that it raised.
        code: The exit code, if the host left or was killed.
        stack: Where the host was when it was ended or crashed, outermost call first.
        output: The host's standard output and standard error during the job, in the order of writing.
        step: The last `step` among the events that it sent, or None.
    """

    host: int
    status: str
    value: Any = None
    error: RemoteError | None = None
    code: int | None = None
    stack: str = ""
    output: str = ""
    step: int | None = None


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
