"""Which faults of a plan came to pass, as the supervisor knows, and what it owes the hosts that they befell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from emulate.cluster.plan import ClusterPlan
from emulate.faults import Disconnect, Fired, Link, Missing, Stop

_OF_A_LINK = 2
"""What was sent while a link was down is sent again after as long once more, as TCP doubles its waits."""


class Befallen:
    """Of a cluster, through all its lives.

    Args:
        plan: With its faults.

    Attributes:
        fired: What came to pass so far.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self.fired: list[Fired] = []
        self._before = 0
        self._stopped: dict[int, float] = {}  # until when
        self._passes_at = 0.0

    def take(self, host: int, event: Mapping[str, Any]) -> None:
        """A host tells that a fault comes to pass."""
        fired = Fired.of(event, self._plan.faults)
        self.fired.append(fired)
        if isinstance(fired.fault, Stop):
            self._stopped[host] = float("inf") if fired.fault.seconds is None else time.monotonic() + fired.fault.seconds
        if isinstance(fired.fault, (Stop, Disconnect)) and fired.fault.seconds is not None:
            times = _OF_A_LINK if isinstance(fired.fault, Disconnect) else 1
            self._passes_at = max(self._passes_at, time.monotonic() + times * fired.fault.seconds)

    def start(self) -> list[int]:
        """The hosts were started; those that were not, because a fault kept them from it."""
        to_come = self._plan.faults_to_come.items()
        self.fired += [Fired(number, fault) for number, fault in to_come if isinstance(fault, (Link, Missing))]
        return [fault.host for _, fault in to_come if isinstance(fault, Missing)]

    def begin_again(self, plan: ClusterPlan) -> None:
        """The hosts are started anew."""
        self._plan = plan
        self._before = len(self.fired)
        self._stopped.clear()
        self._passes_at = 0.0

    @property
    def now(self) -> list[Fired]:
        """What came to pass in this life."""
        return self.fired[self._before :]

    @property
    def stopped(self) -> list[int]:
        """Hosts that are stopped now."""
        return list(self._stopped)

    @property
    def is_passing(self) -> bool:
        """Whether a host is stopped, or without its link, for a time: what waits for it now goes on by itself."""
        return time.monotonic() < self._passes_at

    def to_continue(self) -> list[int]:
        """Hosts whose stop is over, each once."""
        over = [host for host, until in self._stopped.items() if time.monotonic() >= until]
        for host in over:
            del self._stopped[host]
        return over
