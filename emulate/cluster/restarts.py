"""Decide when a cluster with faults is restarted, as a scheduler would, and find the host whose end explains why it failed.

The first to raise has often only lost a peer. A scheduler's SIGTERM to a command is collected, to be handed on to the hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from emulate.cluster.plan import ClusterPlan, HostOutcome
from emulate.cluster.supervision import RunningCluster
from emulate.faults import Disconnect, Fault, Missing, Stop

STANDSTILL = 10.0
"""Seconds without any work after which hosts that wait for one that cannot come are given up."""
_BUSY = 0.05  # of one processor


def asks_to_go_on(cluster: RunningCluster) -> bool:
    """Return whether its hosts left to be restarted, or failed because of a fault since the last restart."""
    left = any(leaves_in_order(outcome) for outcome in cluster.outcomes)
    return left or (bool(cluster.faults.now) and first_cause(cluster.outcomes) is not None)


def next_life(cluster: RunningCluster, number: int) -> ClusterPlan:
    """Return the plan for the restart of a cluster: its faults are over, and its output has another folder."""
    plan = cluster.plan
    directory = plan.directory.parent if plan.directory.name.startswith("life-") else plan.directory
    fired = frozenset(event.number for event in cluster.faults.fired)
    (directory / f"life-{number}").mkdir()
    return replace(plan, directory=directory / f"life-{number}", fired=fired)


class Standstill:
    """Detect whether the hosts wait forever for a host that a fault keeps away.

    Args:
        cluster: Whose hosts.
    """

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._since: float | None = None
        self._used = 0.0

    def is_reached(self) -> bool:
        """Return whether this is so now. Call it several times a second."""
        if not any(is_for_ever(fired.fault) for fired in self._cluster.faults.now):
            return False
        now, used = time.monotonic(), sum(self._cluster.cpu_seconds(host) for host in range(len(self._cluster.roles)))
        if self._since is None or used - self._used > _BUSY * max(1.0, now - self._since):
            self._since, self._used = now, used
        return now - self._since >= STANDSTILL


def is_for_ever(fault: Fault) -> bool:
    """Return whether the fault removes its host for good, even if the process still exists."""
    return isinstance(fault, Missing) or (isinstance(fault, (Stop, Disconnect)) and fault.seconds is None)


PEER_IS_GONE = re.compile(
    r"Socket closed|Connection reset by peer|tasks are unhealthy|failed to connect to all|GOAWAY|Connection refused"
    r"|heartbeat|Broken pipe|UNAVAILABLE|Collective ops is aborted by"
)
"""TensorFlow's errors on a host whose peer exited, or did something else than it."""
TEMPORARY_FAILURE = 75
"""The exit code (EX_TEMPFAIL) by which a program asks to be started again, as gpudist_core's Preempted does."""
PEER_SECONDS = 1.0
"""Seconds to wait, after such an error, for the end of the peer."""
SAVING_SECONDS = 10.0
"""Seconds for the other hosts to exit after one has exited normally."""

_CHATTER = re.compile(
    r"I\d{4} \d\d:\d\d:\d|/job:\w+/replica:\d+/task:\d+$|WARNING: All log messages before absl|E\d{4}.*failed call to cuInit"
)


def telling(text: str, most: int = 20) -> list[str]:
    """Return the last lines of a host's output, without TensorFlow's lines that report no problem."""
    return [line for line in text.splitlines() if line.strip() and not _CHATTER.match(line)][-most:]


def follows_from_a_peer(outcome: HostOutcome) -> bool:
    """Return whether a host raised because another was gone: the other host's end explains more."""
    return outcome.error is not None and bool(PEER_IS_GONE.search(outcome.error.traceback_text + outcome.error.message))


def leaves_in_order(outcome: HostOutcome) -> bool:
    """Return whether a host left to be restarted. Its peers leave too, once they have saved."""
    return outcome.status == "exited" and outcome.code == TEMPORARY_FAILURE


def patience_after(outcome: HostOutcome) -> float:
    """Return for how many seconds to wait for the ends of other hosts after one has failed."""
    if leaves_in_order(outcome):
        return SAVING_SECONDS
    return PEER_SECONDS if follows_from_a_peer(outcome) else 0.0


def first_cause(outcomes: Sequence[HostOutcome]) -> HostOutcome | None:
    """Return the failure that explains most: a host that left, else an error that is not about a peer, else the first."""
    harmless = {"returned", "missing", "ended"}
    failed = [end for end in outcomes if end.status not in harmless and (end.status, end.code) != ("exited", 0)]
    return min(failed, key=follows_from_a_peer, default=None)


_SAME_NOTICE = 1.0
"""Seconds in which another SIGTERM is the same: a wrapper and a scheduler may both send it."""


@contextlib.contextmanager
def first_sigterm() -> Iterator[list[float]]:
    """Yield a list that gets the time of the first SIGTERM. A later one ends this process at once, as if nobody heard it."""
    heard: list[float] = []

    def hear(number: int, _: Any) -> None:
        if not heard:
            heard.append(time.monotonic())
        elif time.monotonic() - heard[0] > _SAME_NOTICE:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)
