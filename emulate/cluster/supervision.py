"""Supervise a running cluster: `RunningCluster` speaks with its processes, `Watch` is the one loop that waits for its hosts.

A host can end in several ways, and each is learned in another place:

- It returned or raised. It says so itself, because only it knows the value and the traceback. Its process ends a moment
  later, so the first word about a host counts.
- It exited, crashed or was killed. The keeper says so, because only a parent can reap. What the host said before comes on
  another socket, and two sockets have no order. So the host's socket is read first.
- The keeper was killed. Its socket closes. Its hosts die with it (see keeper.py), so all that had not ended were killed.
- A fault keeps the host from starting. That is known as soon as the keeper has forked the others.
- It waits for ever. Neither the kernel nor TensorFlow tells: a collective that a peer never joins has no time limit. So
  hang.py judges it from the events of hosts, their processor time and their stacks.

Whatever in this folder waits for hosts waits in `Watch.follow`: a run of `Cluster`, a job of a warm cluster, warm hosts that
are to become idle. The callers say what they wait for, take the events, and bring the judge. The endings are here, once:

- What came in time counts, even if the time is over by now.
- After a failure the other hosts have some seconds more. The first host that raises has often only lost a peer, and the
  peer's end explains more (restarts.py). Nobody judges hangs meanwhile: hosts that wait for a lost peer look like one.
- Ctrl-C, and whatever a caller's function raises, pass through. The `with` block of the cluster then ends everything. No
  signal is handled here, as the handlers belong to the caller's program. Ctrl-C in a terminal does not reach the hosts: the
  pre-loaded parent has a session of its own. So the end has an order, and the stacks can still be read.

There is no thread that supervises: an error in it would reach no caller, and callers fork. So somebody must ask for events.
There is a lock all the same, because a pool ends clusters in another thread. Hence one wait lasts `_SLICE` at most.

Rejected:

- Ending hosts with SIGTERM. TensorFlow's server for MultiWorkerMirroredStrategy handles it, and the process lives on (2.21).
- Freeing hosts that wait for a lost peer (`abort_collective_ops` in each). It takes 15 ms, and a fork of fresh hosts 0.4 s.
  But a failed collective may break later ones of its process, and nobody knows what else a failed program left there.
- A time limit in place of a judge. Programs have steps of minutes, and a user waits for the verdict.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from emulate.cluster import system, threads
from emulate.cluster.channel import ANSWER, CONTROL, EVENT, JOB, LEAVE, RESULT, Channel, Inbox
from emulate.cluster.fault_log import FaultLog
from emulate.cluster.gpus import GpuHold
from emulate.cluster.output_relay import OutputRelay
from emulate.cluster.plan import AGAIN, ClusterPlan, ForkGuard, HostOutcome, Order, host_name, roles_of
from emulate.errors import Unavailable
from emulate.pickling import to_bytes
from emulate.told import Told, told

_LOOKS = 4
_SLICE = 0.2  # so that end(), called by another thread, need not wait longer
_STACK_SECONDS = 1.0
_KEEPER_PATIENCE = 10.0
_KEEPER, _RELAY = -1, -2  # in the selector, beside the numbers of the hosts
Event = dict[str, Any]


@final
class RunningCluster(AbstractContextManager["RunningCluster"]):
    """Control a launched cluster. Somebody must ask for events regularly. Leaving the `with` block ends everything.

    Args:
        plan: What was asked for.
        log: What the pre-loaded parent writes.
        gpus: The GPUs that are held for it; they are let go when it has ended.

    Attributes:
        plan: What was asked for.
        faults: The faults that have occurred, over all restarts.
        roles: The role of each host.
        outcomes: How the hosts ended that have, in the order in which they did.
        notes: What the user should know about the isolation.
        first_use: What a run that takes too long may be waiting for, on GPUs that are used for the first time; empty elsewhere.
        device: What the devices of hosts that train are: `emulated`, `gpu` or `gpu slice`.
        isolation: What isolation is in force, in words.
    """

    def __init__(self, plan: ClusterPlan, log: Path, gpus: GpuHold | None = None) -> None:
        self.plan = plan
        self._fork_guard = ForkGuard()
        self.roles = roles_of(plan.topology)
        self.outcomes: list[HostOutcome] = []  # Invariant: one for a host at most, the first that was learned
        self.faults = FaultLog(plan)
        self.notes: list[Told] = [told("gpus-used")(gpus.text)] if gpus else []
        self.isolation = ""
        self.device = gpus.kind if gpus else "emulated"
        self.first_use = gpus.compiling if gpus else ""
        self._gpus = gpus
        self._log = log
        self._lock = threading.RLock()
        # Invariant: empty until the keeper has forked the hosts. 0 for a host that was reaped, whose number may be another's.
        self._pids: dict[int, int] = {}
        self._started: set[int] = set()
        self._events: list[tuple[int, Event]] = []  # those that nobody has asked for yet
        # Invariant: true only once all are over. A host that leaves first takes the connections of the others with it.
        self._is_told_to_leave = False
        self._is_ending = False  # set without the lock, so that a wait in another thread gives the lock back
        self._deadline = time.monotonic() + plan.start_timeout
        self._keeper, self._keeper_end = Channel.pair()
        self._keeper_inbox = Inbox()
        self._connect()

    def _connect(self) -> None:
        """Make the connections to the hosts."""
        pairs = [Channel.pair() for _ in self.roles]
        self._hosts = [ours for ours, _ in pairs]
        self._host_ends = [theirs for _, theirs in pairs]
        self._inboxes = [Inbox() for _ in self.roles]
        self._relay = OutputRelay(self.roles) if self.plan.echo else None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._keeper, selectors.EVENT_READ, _KEEPER)
        for number, channel in enumerate(self._hosts):
            self._selector.register(channel, selectors.EVENT_READ, number)
        for reader in self._relay.readers if self._relay else ():
            self._selector.register(reader, selectors.EVENT_READ, _RELAY)

    def _disconnect(self) -> None:
        self._selector.close()
        for channel in self._hosts:
            channel.close()
        if self._relay:
            self._relay.close()

    def start(self, hand_over: Callable[[int], None], order: Order) -> None:
        """Give the keeper its end of the connection, its order and what belongs to the hosts. `Preload.launch` calls it once.

        Args:
            hand_over: Sends a descriptor to the pre-loaded parent, which forks the keeper.
            order: The order.
        """
        self._order = order
        with contextlib.suppress(OSError):  # else `events` finds the keeper gone and says why
            hand_over(self._keeper_end.fileno())
            self._keeper.send(CONTROL, pickle.dumps(order))
            self._give_ends()
        self._close_their_ends()

    def restart(self, plan: ClusterPlan) -> None:
        """Kill what is left of the hosts and start all anew, as a scheduler does.

        Network, views and temporary folder stay as they are, with what the program wrote there.

        Args:
            plan: Of the new life: entry, directory, environment and faults may be others.

        Raises:
            Unavailable: When the cluster's keeper is gone.
        """
        with self._lock:
            self._order = replace(self._order, plan=plan.for_keeper(), entry=to_bytes(plan.entry))
            self._keeper.send(CONTROL, AGAIN + pickle.dumps(self._order))
            self._await_again()
            self._disconnect()
            self.plan, self.outcomes = plan, []
            self._pids, self._started, self._events = {}, set(), []
            self._is_told_to_leave = False
            self._deadline = time.monotonic() + plan.start_timeout
            self.faults.begin_again(plan)
            self._connect()
            self._give_ends()
            self._close_their_ends()

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

    def _give_ends(self) -> None:
        self._keeper.send_fds([end.fileno() for end in self._host_ends] + (self._relay.fds if self._relay else []))

    def _close_their_ends(self) -> None:
        for end in (self._keeper_end, *self._host_ends):
            end.close()
        if self._relay:
            self._relay.close_their_ends()

    @property
    def is_passing(self) -> bool:
        """Return whether a temporary fault is active: hosts that wait now will continue."""
        return self.faults.is_passing

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
        for number in self.faults.to_continue():
            self._keeper.send(CONTROL, b"continue %d" % number)
        for closed in self._relay.pass_on() if self._relay else ():
            self._unregister(closed)
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
                status, content = pickle.loads(body)
                end = {"code": 0, "pickled": content} if status == "returned" else {"code": 1, "error": content}
                self._set_outcome(HostOutcome(number, status, **end))
        if inbox.is_closed:
            self._unregister(self._hosts[number])

    def _unregister(self, source: Any) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _take(self, number: int, event: Event) -> None:
        if event.get("event") == "started":
            self._started.add(number)
        if event.get("event") == "fired":
            self.faults.take(number, event)
        if event.get("event") == "unavailable":
            raise Unavailable(event["text"])
        self._events.append((number, event))

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
                for number in self.faults.start():
                    self._set_outcome(HostOutcome(number, "missing"))
            elif message["is"] == "exit":
                number, code = message["host"], message["code"]
                self._read_host(number)  # what it said before it ended has arrived
                stack = threads.stack_of_crash(self.plan.directory / f"host-{number}") if code < 0 else ""
                self._set_outcome(HostOutcome(number, "killed" if code < 0 else "exited", code=code, stack=stack))
                self._pids[number] = 0
        if self._keeper_inbox.is_closed:
            self._lose_keeper()

    def _lose_keeper(self) -> None:
        """Handle a keeper that ended unexpectedly: at the start it could not run, later somebody killed it."""
        self._unregister(self._keeper)
        if not self._pids:
            lines = []
            with contextlib.suppress(OSError):
                lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise Unavailable(
                "The process from which hosts are forked must be able to start. Received: it ended early, and wrote:\n"
                f"{os.linesep.join(lines)}\nCheck that `python -c 'import tensorflow; tensorflow.keras.layers'` works."
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
        shown = {}
        for host, dump in self._dumps().items():
            is_stopped = host in self.faults.stopped or system.is_stopped(self._pids.get(host, 0))
            shown[host] = "(its process is stopped)" if is_stopped else threads.main_thread(dump)
        return shown

    def _dumps(self) -> dict[int, str]:
        with self._lock:
            live = [number for number, pid in self._pids.items() if pid and number in self._started]
            folders = {number: self.plan.directory / f"host-{number}" for number in live}
            before = last = {number: threads.size_of_stacks(folder) for number, folder in folders.items()}
            with contextlib.suppress(OSError):
                self._keeper.send(CONTROL, b"stacks")
            deadline = time.monotonic() + _STACK_SECONDS
            while time.monotonic() < deadline:  # until every host's file has grown and stopped growing
                time.sleep(0.02)
                now = {number: threads.size_of_stacks(folder) for number, folder in folders.items()}
                if now == last and all(now[number] > before[number] for number in now):
                    break
                last = now
            return {number: threads.read_stacks(folder, before[number]) for number, folder in folders.items()}

    def threads(self) -> dict[int, list[threads.Thread]]:
        """Return what the threads of every answering host do."""
        return {number: threads.parse(dump) for number, dump in self._dumps().items()}

    def end(self) -> None:
        """Kill and reap every host and every descendant of theirs; hosts that are over get a moment to leave."""
        if not self._fork_guard.is_here:
            return
        self._is_ending = True
        with self._lock:
            if self._selector.get_map() is None:  # it has been closed
                return
            if self._is_told_to_leave and "chief" not in self.roles:
                deadline = time.monotonic() + self.plan.shutdown_timeout
                while any(self._pids.values()) and not self._keeper_inbox.is_closed and time.monotonic() < deadline:
                    self._pump(min(_SLICE, self.plan.shutdown_timeout))
            with contextlib.suppress(OSError):
                self._keeper.send(CONTROL, b"end")
            # One that is not up yet ends as soon as it finds this socket closed.
            self._keeper.socket.settimeout(_KEEPER_PATIENCE if self._pids else 0.5)
            with contextlib.suppress(OSError):
                while self._keeper.socket.recv(1 << 16):  # it closes after the keeper's last descendant
                    pass
            self._disconnect()
            self._close_their_ends()
            self._keeper.close()
            if self._gpus:
                self._gpus.let_go()
            for number in range(len(self.roles)):
                if all(outcome.host != number for outcome in self.outcomes):
                    self.outcomes.append(HostOutcome(number, "ended"))

    def __exit__(self, *_: object) -> None:
        self.end()


DONE, FAILED, TIMEOUT, HANG = "done", "failed", "timeout", "hang"
"""The endings of `Watch.follow`."""
_POLL = 0.05


class Watch:
    """Wait until the hosts of a cluster are done with something, or never will be.

    Args:
        cluster: Whose hosts.
        timeout: The time limit in seconds; None for none.

    Attributes:
        deadline: When the time limit is over.
        given_up_at: When hosts that are not done are given up, because another one has failed, or because they only serve.
    """

    def __init__(self, cluster: RunningCluster, timeout: float | None = None) -> None:
        self._cluster = cluster
        self.given_up_at = (
            math.inf
        )  # Invariant: finite only after a failure, or once a chief is done. Nobody judges hangs then.
        self.allow(timeout)

    def allow(self, seconds: float | None) -> None:
        """Set the time limit to so many seconds from now."""
        self.deadline = time.monotonic() + (math.inf if seconds is None else seconds)

    def give_up_in(self, seconds: float) -> None:
        """Give the hosts that are not done at most so many seconds from now."""
        self.given_up_at = min(self.given_up_at, time.monotonic() + seconds)

    def follow(
        self, is_done: Callable[[], bool], take: Callable[[int, Event], None], judge: Callable[[], str] = lambda: ""
    ) -> str:
        """Receive events until one of the endings.

        Args:
            is_done: Returns whether what is waited for has happened.
            take: Called with each event and its host's number. What it raises ends the waiting.
            judge: Returns `HANG` or `TIMEOUT` if the hosts never will be done; else an empty text.

        Returns:
            `DONE`, `FAILED` (others were given up after a failure), `TIMEOUT`, or what the judge said.

        Raises:
            Unavailable: When the cluster could not be started, or not in time.
        """
        while not is_done():
            seconds = min(self.deadline, self.given_up_at) - time.monotonic()
            for host, event in self._cluster.events(min(_POLL, max(0.0, seconds))):
                take(host, event)
            if is_done():  # in time, although the time may be over now
                break
            if time.monotonic() >= min(self.deadline, self.given_up_at):
                return FAILED if self.given_up_at <= self.deadline else TIMEOUT
            if self.given_up_at == math.inf and (ending := judge()):
                return ending
        return DONE
