"""Track the step and phase in a host, and trigger its faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emulate.faults.actions import Board, Slowness, inject
from emulate.faults.values import AtStep, Fault, Slow

PEER_SECONDS = 60.0
"""Seconds for which a host waits, before an all-reduce, until a peer has started it."""
_A_MOMENT = 0.05  # from a peer's announcement to its operation's start
_POLL = 0.002

Send = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class HostFaults:
    """Describe what a host needs to know about the faults of its cluster.

    Attributes:
        host: Its number.
        faults: Those still to come, by their place in the list that the user gave.
        board: Shared with the other hosts.
    """

    host: int
    faults: Mapping[int, Fault]
    board: Board

    @property
    def own(self) -> dict[int, AtStep]:
        """Return the faults of this host that occur in a step."""
        return {k: fault for k, fault in self.faults.items() if isinstance(fault, AtStep) and fault.host == self.host}

    @property
    def announces(self) -> bool:
        """Return whether a fault of another host waits until this host enters an all-reduce."""
        others = (fault for fault in self.faults.values() if isinstance(fault, AtStep) and fault.host != self.host)
        return any(fault.phase == "all-reduce" for fault in others)


@dataclass
class Site:
    """Describe a place in the program's graphs, or a moment of its eager code, where a collective starts.

    Attributes:
        is_inside: Whether an optimizer's apply starts it.
        is_of_gradients: Whether it sums the gradients of a step, as far as is known.
    """

    is_inside: bool
    is_of_gradients: bool


@dataclass
class Counter:
    """Count the steps of one optimizer.

    Attributes:
        made: Those whose gradients were there, with those of the run that it was restored from.
    """

    made: int = 0


@dataclass
class Triggers:
    """Count steps and trigger faults.

    Attributes:
        known: What this host has to know.
        send: Tells the supervisor.
    """

    known: HostFaults
    send: Send
    _pending: dict[int, AtStep] = field(init=False)
    _slow: dict[int, Slowness] = field(init=False)
    _made: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)
    _told: set[int] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._pending = dict(self.known.own)
        self._slow = {k: Slowness(fault) for k, fault in self._pending.items() if isinstance(fault, Slow)}

    @property
    def phases(self) -> set[str]:
        """Return the phases in which a fault may occur here."""
        return {fault.phase for fault in self.known.own.values()}

    def input(self) -> None:
        """Note that the data of the next step is about to reach a replica."""
        self._arrive("input", self._made + 1)

    def entering_apply(self, counter: Counter) -> None:
        """Note that the gradients exist and an optimizer is about to apply them."""
        counter.made += 1
        self._step = counter.made
        self._made = max(self._made, counter.made)
        for phase in ("input", "before-all-reduce"):
            self._arrive(phase, self._step)

    def entering(self, site: Site) -> None:
        """Note that a collective is about to start."""
        if not site.is_of_gradients:
            return
        step = self._step_at(site)
        self._arrive("before-all-reduce", step)
        self.known.board.enter(self.known.host, step)
        if any(fault.phase == "all-reduce" and step >= fault.step for fault in list(self._pending.values())):
            self._await_peer(step)
            self._arrive("all-reduce", step)

    def leaving(self, site: Site) -> None:
        """Note that a collective is complete on this host."""
        if site.is_of_gradients:
            self._arrive("after-all-reduce", self._step_at(site))

    def applied(self, counter: Counter) -> None:
        """Note that the weights are updated. If nothing was summed between replicas, faults that wait for a sum occur now."""
        for phase in ("all-reduce", "after-all-reduce"):
            self._arrive(phase, counter.made)

    def writing(self, step: int | None = None) -> None:
        """Handle a half-written checkpoint of this step or of the last one."""
        self._arrive("checkpoint", self._made if step is None else step)

    def _step_at(self, site: Site) -> int:
        return self._step if site.is_inside else self._made + 1

    def _await_peer(self, step: int) -> None:
        deadline = time.monotonic() + PEER_SECONDS
        while not self.known.board.has_peer_entered(self.known.host, step) and time.monotonic() < deadline:
            time.sleep(_POLL)
        time.sleep(_A_MOMENT)

    def _arrive(self, phase: str, step: int) -> None:
        for number, fault in list(self._pending.items()):
            if fault.phase != phase or step < fault.step:
                continue
            if number in self._slow:
                self._tell_once(number, fault, step)
                self._slow[number].slow_down(step)
            elif self._tell_once(number, fault, step):
                inject(fault, self.known.host, self.known.board)
                self._pending.pop(number, None)

    def _tell_once(self, number: int, fault: AtStep, step: int) -> bool:
        """Return whether the fault occurs now, and report it once."""
        with self._lock:
            if number in self._told:
                return False
            self._told.add(number)
        self.send(
            {"event": "fired", "fault": number, "text": str(fault), "host": fault.host, "step": step, "phase": fault.phase}
        )
        return True
