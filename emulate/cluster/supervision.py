"""Supervise a running cluster: receive events, see hosts end, and end everything.

Faults of its plan that have occurred are tracked, with what is still to be done for the affected hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from emulate.cluster import system, threads
from emulate.cluster.channel import ANSWER, CONTROL, EVENT, JOB, LEAVE, RESULT, Channel, Inbox
from emulate.cluster.echo import Echo
from emulate.cluster.gpus import GpuHold
from emulate.cluster.keeper import Again
from emulate.cluster.plan import ClusterPlan, HostOutcome, Owner, host_name, roles_of
from emulate.errors import Unavailable
from emulate.faults import Disconnect, Fired, Link, Missing, Stop
from emulate.pickling import to_bytes
from emulate.told import Told, told

_LOOKS = 4
_SLICE = 0.2  # so that end(), called by another thread, need not wait longer
_KEEPER_PATIENCE = 10.0
_KEEPER, _ECHO = -1, -2  # in the selector, beside the numbers of the hosts
Event = dict[str, Any]


@final
class RunningCluster:
    """Control a launched cluster. Somebody must ask for events regularly. Leaving the `with` block ends everything.

    Args:
        plan: What was asked for.
        log: What the pre-loaded parent writes.
        gpus: The GPUs that are held for it; they are let go when it has ended.

    Attributes:
        plan: What was asked for.
        roles: The role of each host.
        outcomes: How the hosts ended that have, in the order in which they did.
        notes: What the user should know about the isolation.
        first_use: What a run that takes too long may be waiting for, on GPUs that are used for the first time; empty elsewhere.
        device: What the devices of hosts that train are: `emulated`, `gpu` or `gpu slice`.
        isolation: What isolation is in force, in words.
    """

    def __init__(self, plan: ClusterPlan, log: Path, gpus: GpuHold | None = None) -> None:
        self.plan = plan
        self._owner = Owner()
        self.roles = roles_of(plan.topology)
        self.outcomes: list[HostOutcome] = []
        self._befallen = Befallen(plan)
        self.notes: list[Told] = [told("gpus-used")(gpus.text)] if gpus else []
        self.isolation = ""
        self.device = gpus.kind if gpus else "emulated"
        self.first_use = gpus.compiling if gpus else ""
        self._gpus = gpus
        self._log = log
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}
        self._started: set[int] = set()
        self._events: list[tuple[int, Event]] = []
        self._is_told_to_leave = False
        self._is_ending = False
        self._deadline = time.monotonic() + plan.start_timeout
        self._keeper, self._keeper_end = Channel.pair()
        self._keeper_inbox = Inbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._keeper, selectors.EVENT_READ, _KEEPER)
        self._connect()

    def _connect(self) -> None:
        """Make the connections to the hosts."""
        pairs = [Channel.pair() for _ in self.roles]
        self._hosts = [ours for ours, _ in pairs]
        self._host_ends = [theirs for _, theirs in pairs]
        self._echo = Echo(self.roles) if self.plan.echo else None
        self._inboxes = [Inbox() for _ in self.roles]
        for number, channel in enumerate(self._hosts):
            self._selector.register(channel, selectors.EVENT_READ, number)
        for reader in self._echo.readers if self._echo else ():
            self._selector.register(reader, selectors.EVENT_READ, _ECHO)

    def give(self, order: bytes) -> None:
        """Send the keeper its order and what belongs to the hosts (called once, by `Preload.launch`)."""
        self._keeper.send(CONTROL, order)
        self._give_ends()

    def _give_ends(self) -> None:
        self._keeper.send_fds([end.fileno() for end in self._host_ends] + (self._echo.fds if self._echo else []))

    def restart(self, plan: ClusterPlan) -> None:
        """Kill what is left of the hosts and start all anew, as a scheduler does.

        Network, views and temporary folder stay as they are, with what the program wrote there.

        Args:
            plan: Of the new life: entry, directory, environment and faults may be others.

        Raises:
            Unavailable: When the cluster's keeper is gone.
        """
        with self._lock:
            self._keeper.send(CONTROL, Again(plan.for_keeper(), to_bytes(plan.entry)).message())
            self._await_again()
            self._disconnect()
            self.plan, self.outcomes = plan, []
            self._pids, self._started, self._events = {}, set(), []
            self._is_told_to_leave = False
            self._deadline = time.monotonic() + plan.start_timeout
            self._befallen.begin_again(plan)
            self._connect()
            self._give_ends()
            self._close_host_ends()

    def _await_again(self) -> None:
        """Wait until the keeper has reaped every host. Ignore its earlier messages."""
        deadline = time.monotonic() + _KEEPER_PATIENCE
        while time.monotonic() < deadline and not self._keeper_inbox.is_closed:
            if any(pickle.loads(body)["is"] == "again" for _, body in self._keeper_inbox.receive(self._keeper.socket)):
                return
            time.sleep(0.005)
        raise Unavailable(
            "A cluster that is to start again must have its keeper. Received: it did not answer, "
            f"topology={str(self.plan.topology)!r}. Start the run again."
        )

    def _disconnect(self) -> None:
        for channel in self._hosts:
            with contextlib.suppress(KeyError):
                self._selector.unregister(channel)
            channel.close()
        if self._echo:
            for reader in self._echo.readers:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(reader)
            self._echo.close()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[int]:
        """Yield the keeper's end of the connection, and close it here afterwards."""
        try:
            yield self._keeper_end.fileno()
        finally:
            self._close_their_ends()

    def _close_their_ends(self) -> None:
        self._keeper_end.close()
        self._close_host_ends()

    def _close_host_ends(self) -> None:
        for end in self._host_ends:
            end.close()
        if self._echo:
            self._echo.close_their_ends()

    @property
    def fired(self) -> list[Fired]:
        """Return the faults that have occurred so far, over all restarts of the cluster."""
        return self._befallen.fired

    @property
    def fired_now(self) -> list[Fired]:
        """Return the faults that have occurred since the last restart."""
        return self._befallen.now

    @property
    def stopped(self) -> list[int]:
        """Return the hosts that a fault has stopped and that have not continued yet."""
        return self._befallen.stopped

    @property
    def is_passing(self) -> bool:
        """Return whether a temporary fault is active: hosts that wait now will continue."""
        return self._befallen.is_passing

    @property
    def is_over(self) -> bool:
        """Return whether every host has ended; with parameter servers, whether the chief has (the others serve forever)."""
        if "chief" in self.roles:
            return any(outcome.host == 0 for outcome in self.outcomes)
        return len(self.outcomes) == len(self.roles)

    def adopt(self) -> None:
        """Make the calling thread the one that must not wait for this cluster's GPUs."""
        if self._gpus:
            self._gpus.adopt()

    def name(self, host: int) -> str:
        """Return a host's name for messages."""
        return host_name(self.roles, host)

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        """Return the events of the hosts, each with its host's number, in the order of arrival.

        Besides what their entries send: `{"event": "started"}` and `{"event": "exit", "status": ..., "code": ...}`.

        Args:
            timeout: Seconds to wait for something when there is nothing yet.

        Returns:
            Pairs of a host's number and its event.

        Raises:
            Unavailable: When the cluster could not be started, or not in time.
        """
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._is_ending:
                    return []
                self._pump(min(_SLICE, max(0.0, until - time.monotonic())))
                self._check_start()
                if self._events or time.monotonic() >= until or self.is_over:
                    arrived, self._events = self._events, []
                    return arrived

    def _pump(self, timeout: float) -> None:
        ready = [key.data for key, _ in self._selector.select(timeout)]
        for number in ready:
            if number >= 0:
                self._read_host(number)
        if _KEEPER in ready:
            self._read_keeper()
        for number in self._befallen.to_continue():
            self._keeper.send(CONTROL, b"continue %d" % number)
        for closed in self._echo.pass_on() if self._echo else ():
            self._selector.unregister(closed)
        if self.is_over and not self._is_told_to_leave:
            self._is_told_to_leave = True
            for channel in self._hosts:
                with contextlib.suppress(OSError):
                    channel.send(LEAVE, b"")

    def _read_host(self, number: int) -> None:
        inbox = self._inboxes[number]
        for kind, body in inbox.receive(self._hosts[number].socket):
            if kind == EVENT:
                self._take(number, json.loads(body))
            elif kind == ANSWER:
                self._take(number, pickle.loads(body))
            elif kind == RESULT:
                self._take_result(number, *pickle.loads(body))
        if inbox.is_closed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._hosts[number])

    def _take(self, number: int, event: Event) -> None:
        if event.get("event") == "started":
            self._started.add(number)
        if event.get("event") == "fired":
            self._befallen.take(number, event)
        if event.get("event") == "unavailable":
            raise Unavailable(event["text"])
        self._events.append((number, event))

    def _take_result(self, number: int, status: str, content: Any) -> None:
        if status == "returned":
            self._set_outcome(HostOutcome(number, status, code=0, pickled=content))
        else:
            self._set_outcome(HostOutcome(number, status, code=1, error=content))

    def _set_outcome(self, outcome: HostOutcome) -> None:
        if all(other.host != outcome.host for other in self.outcomes):
            self.outcomes.append(outcome)
            self._events.append((outcome.host, {"event": "exit", "status": outcome.status, "code": outcome.code}))

    def _read_keeper(self) -> None:
        for _, body in self._keeper_inbox.receive(self._keeper.socket):
            message = pickle.loads(body)
            if message["is"] == "refused":
                raise message["error"]
            if message["is"] == "ready":
                self._pids, self.isolation = message["hosts"], message["isolation"]
                self.notes += message["notes"]
                for number in self._befallen.start():
                    self._set_outcome(HostOutcome(number, "missing"))
            elif message["is"] == "exit":
                self._take_exit(message["host"], message["code"])
        if self._keeper_inbox.is_closed:
            self._lose_keeper()

    def _take_exit(self, number: int, code: int) -> None:
        self._read_host(number)  # what it said before it ended has arrived
        stack = threads.stack_of_crash(self.plan.directory / f"host-{number}") if code < 0 else ""
        self._set_outcome(HostOutcome(number, "killed" if code < 0 else "exited", code=code, stack=stack))
        self._pids[number] = 0

    def _lose_keeper(self) -> None:
        """Handle a keeper that ended unexpectedly: at the start it could not run, later somebody killed it."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._keeper)
        if not self._pids:
            raise Unavailable(
                "The process from which hosts are forked must be able to start. Received: it ended early, and wrote:\n"
                f"{_last_lines(self._log)}\nCheck that `python -c 'import tensorflow; tensorflow.keras.layers'` works."
            )
        for number in range(len(self.roles)):
            self._read_host(number)
            self._set_outcome(HostOutcome(number, "killed", code=-int(signal.SIGKILL)))

    def _check_start(self) -> None:
        absent = [outcome.host for outcome in self.outcomes if outcome.status == "missing"]
        missing = [number for number in range(len(self.roles)) if number not in {*self._started, *absent}]
        if time.monotonic() > self._deadline and missing and len(self.outcomes) == len(absent):
            names = ", ".join(self.name(number) for number in missing)
            self.end()
            raise Unavailable(
                f"Every host must start within {self.plan.start_timeout:g} s. Received: {names} had not. "
                "The machine may be too busy or too small for this topology: ask for fewer hosts."
            )

    def tell(self, host: int, message: bytes) -> None:
        """Send a host what its entry gets from `HostContext.receive`; a few kilobytes at most, larger things by a file."""
        with contextlib.suppress(OSError):  # one that is gone is reported by its end
            self._hosts[host].send(JOB, message)

    def terminate(self) -> None:
        """Send SIGTERM to every host that runs."""
        self._keeper.send(CONTROL, b"terminate")

    def cpu_seconds(self, host: int) -> float:
        """Return the processor time that a host has used."""
        pid = self._pids.get(host, 0)
        return (system.cpu_seconds(pid) if pid else None) or 0.0

    def is_runnable(self, host: int) -> bool:
        """Return whether a host may still continue.

        A thread of it could do something if there were a processor, or a process that it has started may.
        """
        pid, times_runnable = self._pids.get(host, 0), 0
        if pid and system.has_working_child(pid):
            return True
        for _ in range(_LOOKS):  # a thread that only looks around now and then is seldom met
            times_runnable += bool(pid) and system.is_runnable(pid)
            time.sleep(_SLICE / _LOOKS)
        return times_runnable > 1

    def stacks(self) -> dict[int, str]:
        """Return the Python stack of every live host, outermost call first, without frames of gpudist."""
        shown = {number: threads.main_thread(dump) for number, dump in self._dumps().items()}
        return {number: "(its process is stopped)" if self._is_stopped(number) else stack for number, stack in shown.items()}

    def _is_stopped(self, host: int) -> bool:
        return host in self.stopped or system.is_stopped(self._pids.get(host, 0))

    def _dumps(self) -> dict[int, str]:
        with self._lock:
            live = [number for number, pid in self._pids.items() if pid and number in self._started]
            folders = {number: self.plan.directory / f"host-{number}" for number in live}
            before = {number: threads.size_of_stacks(folder) for number, folder in folders.items()}
            with contextlib.suppress(OSError):
                self._keeper.send(CONTROL, b"stacks")
            _wait_until_written(folders, before)
            return {number: threads.read_stacks(folder, before[number]) for number, folder in folders.items()}

    def threads(self) -> dict[int, list[threads.Thread]]:
        """Return what the threads of every answering host do."""
        return {number: threads.parse(dump) for number, dump in self._dumps().items()}

    def end(self) -> None:
        """Kill and reap every host and every descendant of theirs; hosts that are over get a moment to leave."""
        if not self._owner.is_here:
            return
        self._is_ending = True
        with self._lock:
            if self._selector.get_map() is None:
                return
            if self._is_told_to_leave and "chief" not in self.roles:
                deadline = time.monotonic() + self.plan.shutdown_timeout
                while any(self._pids.values()) and not self._keeper_inbox.is_closed and time.monotonic() < deadline:
                    self._pump(min(_SLICE, self.plan.shutdown_timeout))
            self._end_keeper()
            if self._echo:
                self._echo.close()
            self._close_their_ends()
            for channel in (self._keeper, *self._hosts):
                channel.close()
            self._selector.close()
            if self._gpus:
                self._gpus.let_go()
            for number in range(len(self.roles)):
                if all(outcome.host != number for outcome in self.outcomes):
                    self.outcomes.append(HostOutcome(number, "ended"))

    def _end_keeper(self) -> None:
        """Wait for the keeper's end: its socket closes after its last descendant. Other messages are ignored."""
        with contextlib.suppress(OSError):
            self._keeper.send(CONTROL, b"end")
        # One that is not up yet ends as soon as it finds this socket closed.
        self._keeper.socket.settimeout(_KEEPER_PATIENCE if self._pids else 0.5)
        with contextlib.suppress(OSError):
            while self._keeper.socket.recv(1 << 16):
                pass

    def __enter__(self) -> RunningCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


def _wait_until_written(folders: dict[int, Path], before: dict[int, int]) -> None:
    """Wait until every host's file has grown and stopped growing, for at most a second."""
    deadline, last = time.monotonic() + 1.0, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = {number: threads.size_of_stacks(folder) for number, folder in folders.items()}
        if now == last and all(now[number] > before[number] for number in now):
            return
        last = now


def _last_lines(log: Path) -> str:
    with contextlib.suppress(OSError):
        return os.linesep.join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    return ""


_OF_A_LINK = 2
"""Factor on the time of a cut link. TCP doubles its waits, so it resends after the same time again."""


class Befallen:
    """Track the faults of a cluster through all its restarts.

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
        """Process a host's report that a fault occurs."""
        fired = Fired.of(event, self._plan.faults)
        self.fired.append(fired)
        if isinstance(fired.fault, Stop):
            self._stopped[host] = float("inf") if fired.fault.seconds is None else time.monotonic() + fired.fault.seconds
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
        self._stopped.clear()
        self._passes_at = 0.0

    @property
    def now(self) -> list[Fired]:
        """Return the faults that have occurred since the last restart."""
        return self.fired[self._before :]

    @property
    def stopped(self) -> list[int]:
        """Return the hosts that are stopped now."""
        return list(self._stopped)

    @property
    def is_passing(self) -> bool:
        """Return whether a host is stopped, or without its link, for a limited time: hosts that wait for it will continue."""
        return time.monotonic() < self._passes_at

    def to_continue(self) -> list[int]:
        """Return the hosts whose stop is over, each once."""
        over = [host for host, until in self._stopped.items() if time.monotonic() >= until]
        for host in over:
            del self._stopped[host]
        return over
