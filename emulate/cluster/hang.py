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
from emulate.cluster.threads import DATA, LOCK, SLEEP, TENSORFLOW, Thread, is_at_a_lock, place_of, waits_for
from emulate.topology import Topology

_PATIENCE = 2.5
"""Seconds of standstill that are waited for: what is about to be completed, or to fail by itself, has done so by then."""
_IDLE_PATIENCE = 10.0
"""Seconds of standstill where some hosts are in no collective: their data may still be on its way."""
_ENDLESS = {
    DATA: "waits for the next batch of its data",
    LOCK: "waits for another of its threads (a lock, a queue, an event)",
    TENSORFLOW: "waits in a TensorFlow function, in no collective",
}
_AT_A_LOCK = "waits for a lock that one of its threads holds"
_BUSY = 0.1  # of one processor: a host in a hung collective uses next to none
_STRAGGLER_BUSY = 0.05


class Watched(Protocol):
    """Define what a judge asks a cluster."""

    def cpu_seconds(self, host: int) -> float:
        """Return the processor time that the host has used."""

    def is_runnable(self, host: int) -> bool:
        """Return whether a thread of the host can run."""

    def threads(self) -> dict[int, list[Thread]]:
        """Return what the threads of each host do."""


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
class HostState:
    """Hold what is known about one host."""

    inside: dict[int, tuple[int, str]] = field(default_factory=dict)
    last: str | None = None  # its last collective, with its number
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
        clock: The time in seconds.

    Example:
        judge = HangJudge(plan.topology)
        for host, event in cluster.events(0.1):
            judge.feed(host, event)
        hang = judge.verdict(cluster)
    """

    def __init__(self, topology: Topology, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._roles = roles_of(topology)
        self._hosts = [HostState() for _ in self._roles]
        self._clock = clock
        self._since: float | None = None
        self._cpu: dict[int, float] = {}

    def feed(self, host: int, event: Mapping[str, Any]) -> None:
        """Take in an event of a host: `collective`, `progress`, `reached`, `continued` or `exit`."""
        state, kind = self._hosts[host], event["event"]
        if kind == "collective":
            state.last = f"{event['name']}, number {event['ordinal']}"
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

    def state(self, host: int) -> HostState:
        """Return what is known about a host."""
        return self._hosts[host]

    def verdict(self, cluster: Watched) -> Hang | None:
        """Return the hang, or None while a host may still continue. Call it several times a second."""
        live = {number: host for number, host in enumerate(self._hosts) if host.end is None}
        are_stuck = all(host.is_stuck for host in live.values())
        # A member is missing, or the live hosts are in different collectives.
        is_hopeless = are_stuck and (len(live) < len(self._hosts) or len({host.place for host in live.values()}) > 1)
        is_idle = not are_stuck and hasattr(cluster, "threads")
        if not live or not (is_hopeless or is_idle) or getattr(cluster, "is_passing", False):
            self._since = None
            return None
        now, used = self._clock(), {number: cluster.cpu_seconds(number) for number in live}
        if self._since is None:
            self._since, self._cpu = now, used
        seconds = now - self._since
        if seconds < (_PATIENCE if is_hopeless else _IDLE_PATIENCE):
            return None
        if any(used[number] - self._cpu[number] > _BUSY * seconds for number in live):
            self._since, self._cpu = now, used
            return None
        if is_hopeless:
            where = {number: self._where(host) for number, host in enumerate(self._hosts)}
            return Hang(self._code(live, cluster), self._text(where), where)
        self._since = None  # asked again only after as long
        return self._explain(live, cluster)

    def _explain(self, live: dict[int, HostState], cluster: Any) -> Hang | None:
        """Return what hosts outside of collectives wait for, if no host works and it can never come."""
        if any(cluster.is_runnable(number) for number in live):
            return None
        threads: dict[int, list[Thread]] = cluster.threads()
        outside = {
            number: waits_for(threads[number]) for number, host in live.items() if not host.is_stuck and number in threads
        }
        if len(outside) < sum(not host.is_stuck for host in live.values()) or not set(outside.values()) <= _ENDLESS.keys():
            return None
        all_threads = (thread for host_threads in threads.values() for thread in host_threads)
        is_data_locked = any(thread.feeds and thread.waits_for == LOCK for thread in all_threads)
        if len(outside) == len(live) and LOCK not in outside.values() and not is_data_locked:
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

    def _code(self, live: dict[int, HostState], cluster: Watched) -> str:
        ends = {host.end[0] for host in self._hosts if host.end is not None}
        if ends - {"returned", "reached"}:
            return "host-exited"
        if ends:
            return "unequal-steps"
        ordinals = {host.place[1] for host in live.values()}
        names = {host.place[2] for host in live.values()}
        have_the_same = len(ordinals) == 1 and len(names) > 1 and all(names <= host.known for host in live.values())
        # One line starts the same collectives in different orders. At another line a host may well do something alone.
        is_a_matter_of_order = have_the_same and len(set(map(place_of, cluster.threads().values()))) <= 1
        return "collective-order" if is_a_matter_of_order else "collective-mismatch"

    def _where(self, host: HostState) -> str:
        after = host.after
        if host.end is None:
            _, ordinal, name = host.place
            return f"waits in {name}, its collective number {ordinal}{after}"
        how = {"returned": "ended its program", "reached": "made all its steps", "raised": "raised"}
        return f"{how.get(host.end[0]) or _how_it_ended(*host.end)}{after}"


class Stragglers:
    """Check whether unfinished hosts can never finish, because they wait for finished ones.

    Args:
        cluster: Whose hosts.
        patience: Seconds for which they have done nothing; nobody can know a wait to be for ever.
        clock: The time in seconds.
    """

    def __init__(self, cluster: Watched, patience: float, *, clock: Callable[[], float] = time.monotonic) -> None:
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
        worked = [self._cluster.cpu_seconds(host) - before for host, before in zip(pending, self._used, strict=True)]
        is_idle = all(seconds < _STRAGGLER_BUSY * (now - self._since) for seconds in worked)
        if is_idle and not any(self._cluster.is_runnable(host) for host in pending):
            threads = self._cluster.threads()
            waiting = [threads.get(host, []) for host in pending]
            # A thread in TensorFlow there is in any case: locks alone may have a time limit.
            have_one_in_tensorflow = all(any(thread.waits_for == TENSORFLOW for thread in own) for own in waiting)
            if have_one_in_tensorflow and all(waits_for(own) in (TENSORFLOW, LOCK) for own in waiting):
                return True
        self._begin(pending, now)
        return False

    def _begin(self, pending: list[int], now: float) -> None:
        self._pending, self._since = list(pending), now
        self._used = [self._cluster.cpu_seconds(host) for host in pending]


_WORDS = {
    DATA: "waits for the next batch of its data",
    LOCK: "waits for a lock or another thread",
    TENSORFLOW: "is in a TensorFlow function",
    SLEEP: "sleeps",
}


def explain_hang(cluster: RunningCluster, judge: HangJudge) -> str:
    """Return a text about each host: what it does, its last step and collective, its stack.

    Args:
        cluster: The cluster.
        judge: Was fed with the cluster's events; one that was not knows the stacks alone.

    Returns:
        The text.
    """
    stacks, threads = cluster.stacks(), cluster.threads()
    ends = {outcome.host: outcome for outcome in cluster.outcomes}
    lines = [f"It was to be expected: {fired}." for fired in cluster.faults.now]
    for host in range(len(cluster.roles)):
        state = judge.state(host)
        if host in ends:
            how = {"returned": "has ended", "raised": "has raised"}
            doing = how.get(ends[host].status) or _how_it_ended(ends[host].status, ends[host].code)
        elif host in cluster.faults.stopped:
            doing = "is stopped by a fault"
        elif state.inside and state.last is not None:
            doing = f"waits in {state.last.rpartition(', ')[0]}"
        else:
            host_threads = threads.get(host, [])
            doing = _WORDS.get(waits_for(host_threads), "runs") + place_of(host_threads)
        details = [f"last step {state.step}"] if state.step is not None else []
        details += [f"last collective {state.last}"] if state.last is not None else []
        known = f" ({', '.join(details)})" if details else ""
        lines.append(f"{cluster.name(host)} {doing}{known}" + (f":\n{stacks[host]}" if stacks.get(host) else ""))
    return "\n".join(lines)


def _how_it_ended(status: str, code: int | None) -> str:
    if status == "exited":
        return f"left with exit code {code}"
    if status == "killed":
        return f"was killed by signal {-(code or 0)}"
    return "never started" if status == "missing" else "was ended"
