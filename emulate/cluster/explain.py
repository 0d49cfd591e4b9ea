"""Describe each host of a cluster that does not continue: what it waits for, its last step and collective, its stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emulate.cluster.hang import Hang, HangJudge
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.threads import DATA, LOCK, SLEEP, TENSORFLOW, place_of, waits_for

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
