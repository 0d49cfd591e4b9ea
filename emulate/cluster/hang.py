"""Knows when a cluster hangs for ever: every live host is inside a collective that no live peer can complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from emulate.cluster.roles import host_name, roles_of
from emulate.topology import Topology

PATIENCE = 2.5
"""Seconds of standstill that are waited for: what is about to be completed, or to fail by itself, has done so by then."""
_BUSY = 0.1  # of one processor: a host in a hung collective uses next to none


class Watched(Protocol):
    """What a judge asks of a cluster."""

    def cpu_seconds(self, host: int) -> float:
        """Processor time that the host has used so far."""


@dataclass(frozen=True)
class Hang:
    """A cluster that hangs.

    Attributes:
        code: The suspected cause: `host-exited`, `unequal-steps` or `collective-mismatch`.
        description: Who waits where, and for whom.
        where: The same for each host.
    """

    code: str
    description: str
    where: dict[int, str]


@dataclass
class _Host:
    """What is known of one host."""

    inside: dict[int, tuple[int, str]] = field(default_factory=dict)
    step: int | None = None
    end: tuple[str, int | None] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a replica is inside. Others may not be: some collectives (is there more data?) are for one a host."""
        return self.end is None and bool(self.inside)

    @property
    def place(self) -> tuple[int, int, str]:
        """The collective of the first replica that is inside: its number on the host, its ordinal, its name."""
        replica = min(self.inside)
        return replica, *self.inside[replica]


class HangJudge:
    """Is fed with the events of a cluster and says when nothing can go on any more.

    A host that computes, sleeps or waits for input is not inside a collective, and nothing is said while there is one.

    Args:
        topology: The cluster's shape.
        patience: Seconds for which nothing may have moved.
        clock: The time in seconds.

    Example:
        judge = HangJudge(plan.topology)
        for host, event in cluster.events(0.1):
            judge.feed(host, event)
        hang = judge.verdict(cluster)
    """

    def __init__(self, topology: Topology, *, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        self._roles = roles_of(topology)
        self._hosts = [_Host() for _ in self._roles]
        self._patience = patience
        self._clock = clock
        self._since: float | None = None
        self._cpu: dict[int, float] = {}

    def feed(self, host: int, event: Mapping[str, Any]) -> None:
        """Take in an event of a host: `collective`, `progress`, `reached` or `exit`."""
        known, kind = self._hosts[host], event["event"]
        if kind == "collective":
            self._move(known, event)
        elif kind == "progress":
            known.step = event["step"]
        elif kind == "reached":
            known.step, known.end = event["step"], ("reached", None)
        elif kind == "exit":
            known.end = (event["status"], event.get("code"))
        else:
            return
        self._since = None

    def _move(self, host: _Host, event: Mapping[str, Any]) -> None:
        if event["phase"] == "enter":
            host.inside[event["replica"]] = (event["ordinal"], event["name"])
        else:
            host.inside.pop(event["replica"], None)

    def verdict(self, cluster: Watched) -> Hang | None:
        """What is known now; None while somebody may still go on. To be asked several times a second."""
        live = {number: host for number, host in enumerate(self._hosts) if host.end is None}
        if not live or not all(host.is_stuck for host in live.values()) or not self._is_hopeless(live):
            self._since = None
            return None
        now = self._clock()
        if self._since is None or self._has_worked(live, cluster, now - self._since):
            self._since = now
            self._cpu = {number: cluster.cpu_seconds(number) for number in live}
        return self._describe(live) if now - self._since >= self._patience else None

    def _is_hopeless(self, live: dict[int, _Host]) -> bool:
        """Whether a member is missing, or the live ones are in different collectives."""
        return len(live) < len(self._hosts) or len({host.place for host in live.values()}) > 1

    def _has_worked(self, live: dict[int, _Host], cluster: Watched, seconds: float) -> bool:
        used = (cluster.cpu_seconds(number) - self._cpu[number] for number in live)
        return seconds >= self._patience and any(one > _BUSY * seconds for one in used)

    def _describe(self, live: dict[int, _Host]) -> Hang:
        where = {number: self._where(host) for number, host in enumerate(self._hosts)}
        text = "; ".join(f"{host_name(self._roles, number)} {what}" for number, what in where.items())
        return Hang(self._code(live), text, where)

    def _code(self, live: dict[int, _Host]) -> str:
        ends = {host.end[0] for host in self._hosts if host.end is not None}
        if ends - {"returned", "reached"}:
            return "host-exited"
        return "unequal-steps" if ends else "collective-mismatch"

    def _where(self, host: _Host) -> str:
        after = "" if host.step is None else f" after step {host.step}"
        if host.end is None:
            _, ordinal, name = host.place
            return f"waits in {name}, its collective number {ordinal}{after}"
        status, code = host.end
        how = {
            "returned": "ended its program",
            "reached": "made all its steps",
            "raised": "raised",
            "exited": f"left with exit code {code}",
            "killed": f"was killed by signal {-(code or 0)}",
        }.get(status, "was ended")
        return f"{how}{after}"
