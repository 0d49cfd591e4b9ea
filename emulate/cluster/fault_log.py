"""Track the faults of a cluster that have occurred, and what is still to be done for the affected hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from emulate.cluster.plan import ClusterPlan
from emulate.faults import Disconnect, Fired, Link, Missing, Stop

_OF_A_LINK = 2
"""Factor on the time of a cut link. TCP doubles its waits, so it resends after the same time again."""


class FaultLog:
    """Track the faults of a cluster through all its restarts.

    Args:
        plan: With its faults.

    Attributes:
        fired: Those that have occurred so far.
        stopped: The hosts that are stopped now, and until when.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self.fired: list[Fired] = []
        self._before = 0
        self.stopped: dict[int, float] = {}
        self._passes_at = 0.0

    def take(self, host: int, event: Mapping[str, Any]) -> None:
        """Process a host's report that a fault occurs."""
        fired = Fired.of(event, self._plan.faults)
        self.fired.append(fired)
        if isinstance(fired.fault, Stop):
            self.stopped[host] = float("inf") if fired.fault.seconds is None else time.monotonic() + fired.fault.seconds
        if isinstance(fired.fault, (Stop, Disconnect)) and fired.fault.seconds is not None:
            times = _OF_A_LINK if isinstance(fired.fault, Disconnect) else 1
            self._passes_at = max(self._passes_at, time.monotonic() + times * fired.fault.seconds)

    def start(self) -> list[int]:
        """Note that the hosts were started, except for those that a fault keeps from starting."""
        to_come = self._plan.faults_to_come.items()
        self.fired += [Fired(number, fault) for number, fault in to_come if isinstance(fault, (Link, Missing))]
        return [fault.host for _, fault in to_come if isinstance(fault, Missing)]

    def begin_again(self, plan: ClusterPlan) -> None:
        """Note that the hosts are restarted."""
        self._plan = plan
        self._before = len(self.fired)
        self.stopped.clear()
        self._passes_at = 0.0

    @property
    def now(self) -> list[Fired]:
        """Return the faults that have occurred since the last restart."""
        return self.fired[self._before :]

    @property
    def is_passing(self) -> bool:
        """Return whether a host is stopped, or without its link, for a limited time: hosts that wait for it will continue."""
        return time.monotonic() < self._passes_at

    def to_continue(self) -> list[int]:
        """Return the hosts whose stop is over, each once."""
        over = [host for host, until in self.stopped.items() if time.monotonic() >= until]
        for host in over:
            del self.stopped[host]
        return over
