"""Decide when a cluster with faults is restarted, as a scheduler would."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from emulate.cluster.failures import first_cause, leaves_in_order
from emulate.cluster.plan import ClusterPlan
from emulate.cluster.supervision import RunningCluster
from emulate.faults import Disconnect, Fault, Missing, Stop

STANDSTILL = 10.0
"""Seconds without any work after which hosts that wait for one that cannot come are given up."""
_BUSY = 0.05  # of one processor


def asks_to_go_on(cluster: RunningCluster) -> bool:
    """Return whether its hosts left to be restarted, or failed because of a fault since the last restart."""
    left = any(leaves_in_order(outcome) for outcome in cluster.outcomes)
    return left or (bool(cluster.fired_now) and first_cause(cluster.outcomes) is not None)


def next_life(cluster: RunningCluster, number: int) -> ClusterPlan:
    """Return the plan for the restart of a cluster: its faults are over, and its output has another folder."""
    plan = cluster.plan
    directory = plan.directory.parent if plan.directory.name.startswith("life-") else plan.directory
    fired = frozenset(event.number for event in cluster.fired)
    (directory / f"life-{number}").mkdir()
    return replace(plan, directory=directory / f"life-{number}", fired=fired)


class Standstill:
    """Detect whether the hosts wait forever for a host that a fault keeps away.

    Args:
        cluster: Whose hosts.
        clock: The time in seconds.
    """

    def __init__(self, cluster: RunningCluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._since: float | None = None
        self._used = 0.0

    def is_reached(self) -> bool:
        """Return whether this is so now. Call it several times a second."""
        if not any(is_for_ever(fired.fault) for fired in self._cluster.fired_now):
            return False
        now, used = self._clock(), self._processor_seconds()
        if self._since is None or used - self._used > _BUSY * max(1.0, now - self._since):
            self._since, self._used = now, used
        return now - self._since >= STANDSTILL

    def _processor_seconds(self) -> float:
        return sum(self._cluster.cpu_seconds(host) for host in range(len(self._cluster.roles)))


def is_for_ever(fault: Fault) -> bool:
    """Return whether the fault removes its host for good, even if the process still exists."""
    return isinstance(fault, Missing) or (isinstance(fault, (Stop, Disconnect)) and fault.seconds is None)
