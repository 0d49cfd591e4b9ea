"""Detect when a cluster hangs forever, and why, and describe each host of it.

Either every live host is inside a collective that no live peer can complete. Or nobody works, and those that are in no
collective wait for a lock, a queue or an event that none of their threads can give back, fill or set, or for data that does not
come.

A host that does not continue is described by what it waits for, its last step and collective, and its stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from emulate.cluster.plan import host_name, roles_of
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.threads import DATA, LOCK, SLEEP, TENSORFLOW, Thread, is_at_a_lock, is_fed_by_a_lock, place_of, waits_for
from emulate.topology import Topology

PATIENCE = 2.5
"""Seconds of standstill that are waited for: what is about to be completed, or to fail by itself, has done so by then."""
IDLE_PATIENCE = 10.0
_ENDLESS = {
    DATA: "waits for the next batch of its data",
    LOCK: "waits for another of its threads (a lock, a queue, an event)",
    TENSORFLOW: "waits in a TensorFlow function, in no collective",
}
_AT_A_LOCK = "waits for a lock that one of its threads holds"
_BUSY = 0.1  # of one processor: a host in a hung collective uses next to none


class Watched(Protocol):
    """Define what a judge asks a cluster."""

    def cpu_seconds(self, host: int) -> float:
        """Return the processor time that the host has used."""


@dataclass(frozen=True)
class Hang:
    """Describe a cluster that hangs.

    Attributes:
        code: The suspected cause: `host-exited`, `unequal-steps`, `collective-mismatch`, `collective-order`,
            `waits-for-data` or `python-deadlock`.
        description: Who waits where, and for whom.
        where: The same for each host.
    """

    code: str
    description: str
    where: dict[int, str]


@dataclass
class _Host:
    """Hold what is known about one host."""

    inside: dict[int, tuple[int, str]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # collectives that its program has
    step: int | None = None
    end: tuple[str, int | None] | None = None

    @property
    def after(self) -> str:
        """Return the text about its last step."""
        return "" if self.step is None else f" after step {self.step}"

    @property
    def is_stuck(self) -> bool:
        """Return whether a replica is inside a collective. Others may be outside: some collectives run once on each host."""
        return self.end is None and bool(self.inside)

    @property
    def place(self) -> tuple[int, int, str]:
        """Return the collective of the first replica inside one: its number on the host, its ordinal, its name."""
        replica = min(self.inside)
        return replica, *self.inside[replica]


class HangJudge:
    """Follow the events of a cluster, and report when nothing can continue.

    A host that computes or sleeps goes on by itself, and nothing is said while there is one, nor while a fault that ends by
    itself lasts.

    Args:
        topology: The cluster's shape.
        patience: Seconds for which nothing may have moved where all are in collectives.
        idle_patience: The same where some are not, which nobody can know to be for ever: data may be on its way.
        clock: The time in seconds.

    Example:
        judge = HangJudge(plan.topology)
        for host, event in cluster.events(0.1):
            judge.feed(host, event)
        hang = judge.verdict(cluster)
    """

    def __init__(
        self,
        topology: Topology,
        *,
        patience: float = PATIENCE,
        idle_patience: float = IDLE_PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roles = roles_of(topology)
        self._hosts = [_Host() for _ in self._roles]
        self._patience = patience
        self._idle_patience = idle_patience
        self._clock = clock
        self._since: float | None = None
        self._cpu: dict[int, float] = {}

    def feed(self, host: int, event: Mapping[str, Any]) -> None:
        """Take in an event of a host: `collective`, `progress`, `reached`, `continued` or `exit`."""
        state, kind = self._hosts[host], event["event"]
        if kind == "collective":
            if event["phase"] == "enter":
                state.inside[event["replica"]] = (event["ordinal"], event["name"])
            else:
                state.inside.pop(event["replica"], None)
        elif kind == "site":
            state.known.add(event["name"])
        elif kind == "progress":
            state.step = event["step"]
        elif kind == "reached":
            state.step, state.end = event["step"], ("reached", None)
        elif kind == "continued":
            state.end = None
        elif kind == "exit":
            state.end = (event["status"], event.get("code"))
        else:
            return
        self._since = None

    def verdict(self, cluster: Watched) -> Hang | None:
        """Return the hang, or None while a host may still continue. Call it several times a second."""
        live = {number: host for number, host in enumerate(self._hosts) if host.end is None}
        is_hopeless = bool(live) and all(host.is_stuck for host in live.values()) and self._is_hopeless(live)
        is_idle = bool(live) and not all(host.is_stuck for host in live.values()) and hasattr(cluster, "threads")
        if not (is_hopeless or is_idle) or getattr(cluster, "is_passing", False):
            self._since = None
            return None
        now, patience = self._clock(), self._patience if is_hopeless else self._idle_patience
        if self._since is None or self._has_worked(live, cluster, now - self._since, patience):
            self._since = now
            self._cpu = {number: cluster.cpu_seconds(number) for number in live}
        if now - self._since < patience:
            return None
        if is_hopeless:
            where = {number: self._where(host) for number, host in enumerate(self._hosts)}
            return Hang(self._code(live), self._text(where), where)
        self._since = None  # asked again only after as long
        return self._explain(live, cluster)

    def _is_hopeless(self, live: dict[int, _Host]) -> bool:
        """Return whether a member is missing, or the live hosts are in different collectives."""
        return len(live) < len(self._hosts) or len({host.place for host in live.values()}) > 1

    def _has_worked(self, live: dict[int, _Host], cluster: Watched, seconds: float, patience: float) -> bool:
        used = (cluster.cpu_seconds(number) - self._cpu[number] for number in live)
        return seconds >= patience and any(cpu_seconds > _BUSY * seconds for cpu_seconds in used)

    def _explain(self, live: dict[int, _Host], cluster: Any) -> Hang | None:
        """Return what hosts outside of collectives wait for, if no host works and it can never come."""
        if any(cluster.is_runnable(number) for number in live):
            return None
        threads: dict[int, list[Thread]] = cluster.threads()
        outside = {
            number: waits_for(threads[number]) for number, host in live.items() if not host.is_stuck and number in threads
        }
        if len(outside) < sum(not host.is_stuck for host in live.values()) or not set(outside.values()) <= _ENDLESS.keys():
            return None
        is_awaited = len(outside) < len(live) or LOCK in outside.values() or any(map(is_fed_by_a_lock, threads.values()))
        if not is_awaited:
            return None  # data may be on its way, and a step that the probe does not see into may be long
        places = {number: place_of(threads[number]) for number in outside}
        where = {number: self._where(host) for number, host in enumerate(self._hosts) if number not in outside}
        for number, kind in outside.items():
            doing = _AT_A_LOCK if kind == LOCK and is_at_a_lock(threads[number]) else _ENDLESS[kind]
            where[number] = f"{doing}{places[number]}{self._hosts[number].after}"
        code = "python-deadlock" if LOCK in outside.values() else "waits-for-data"
        return Hang(code, self._text(where), dict(sorted(where.items())))

    def _text(self, where: dict[int, str]) -> str:
        return "; ".join(f"{host_name(self._roles, number)} {what}" for number, what in sorted(where.items()))

    def _code(self, live: dict[int, _Host]) -> str:
        ends = {host.end[0] for host in self._hosts if host.end is not None}
        if ends - {"returned", "reached"}:
            return "host-exited"
        if ends:
            return "unequal-steps"
        return "collective-order" if self._is_a_matter_of_order(live) else "collective-mismatch"

    def _is_a_matter_of_order(self, live: dict[int, _Host]) -> bool:
        """Return whether the hosts run the same collectives, equally many, in different orders."""
        ordinals = {host.place[1] for host in live.values()}
        names = {host.place[2] for host in live.values()}
        return len(ordinals) == 1 and len(names) > 1 and all(names <= host.known for host in live.values())

    def _where(self, host: _Host) -> str:
        after = host.after
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
            "missing": "never started",
        }.get(status, "was ended")
        return f"{how}{after}"


_WORDS = {
    DATA: "waits for the next batch of its data",
    LOCK: "waits for a lock or another thread",
    TENSORFLOW: "is in a TensorFlow function",
    SLEEP: "sleeps",
}


@dataclass(frozen=True)
class HostState:
    """Hold what is known about a host.

    Attributes:
        host: Its number.
        name: What messages call it.
        doing: What it does, in words.
        step: Its last step, counted from 1; None where none was seen.
        collective: Its last collective; None where none was seen.
        stack: Its Python stack, outermost call first; empty where it is gone.
    """

    host: int
    name: str
    doing: str
    step: int | None
    collective: str | None
    stack: str

    def __str__(self) -> str:
        parts = [f"last step {self.step}"] if self.step is not None else []
        parts += [f"last collective {self.collective}"] if self.collective else []
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.name} {self.doing}{details}" + (f":\n{self.stack}" if self.stack else "")


@dataclass
class Follower:
    """Follow the events of a cluster, to tell where each host is.

    Args:
        cluster: Which one.
    """

    cluster: RunningCluster
    judge: HangJudge = field(init=False)
    _steps: dict[int, int] = field(default_factory=dict, init=False)
    _collectives: dict[int, str] = field(default_factory=dict, init=False)
    _inside: dict[int, set[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.judge = HangJudge(self.cluster.plan.topology)

    def feed(self, host: int, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        self.judge.feed(host, event)
        if event["event"] == "progress":
            self._steps[host] = event["step"]
        elif event["event"] == "collective":
            self._collectives[host] = f"{event['name']}, number {event['ordinal']}"
            inside = self._inside.setdefault(host, set())
            (inside.add if event["phase"] == "enter" else inside.discard)(event["replica"])

    def hang(self) -> Hang | None:
        """Return the hang if nothing can continue; None for a standstill that a fault made."""
        return None if self.cluster.fired_now else self.judge.verdict(self.cluster)

    def step(self, host: int) -> int | None:
        """Return the last step that a host was seen to make."""
        return self._steps.get(host)

    def states(self) -> list[HostState]:
        """Return where each host is."""
        stacks, threads = self.cluster.stacks(), self.cluster.threads()
        ends = {outcome.host: outcome for outcome in self.cluster.outcomes}
        states = []
        for host in range(len(self.cluster.roles)):
            if host in ends:
                doing = _ended(ends[host].status, ends[host].code)
            elif host in self.cluster.stopped:
                doing = "is stopped by a fault"
            elif self._inside.get(host):
                doing = f"waits in {self._collectives[host].rpartition(', ')[0]}"
            else:
                host_threads = threads.get(host, [])
                doing = _WORDS.get(waits_for(host_threads), "runs") + place_of(host_threads)
            states.append(
                HostState(
                    host,
                    self.cluster.name(host),
                    doing,
                    self._steps.get(host),
                    self._collectives.get(host),
                    stacks.get(host, ""),
                )
            )
        return states


def explain_hang(follower: Follower) -> str:
    """Return a text about each host: what it does, its last step and collective, its stack.

    Args:
        follower: Was fed with the cluster's events; one that was not knows the stacks alone.

    Returns:
        The text.
    """
    expected = [f"It was to be expected: {fired}." for fired in follower.cluster.fired_now]
    return "\n".join([*expected, *(str(state) for state in follower.states())])


def _ended(status: str, code: int | None) -> str:
    return {
        "returned": "has ended",
        "raised": "has raised",
        "exited": f"left with exit code {code}",
        "killed": f"was killed by signal {-(code or 0)}",
        "missing": "never started",
    }.get(status, "was ended")
