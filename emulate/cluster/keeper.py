"""Run the keeper of one cluster: isolate it, fork its hosts, report their ends, and clean up."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from emulate.cluster import host, system, threads
from emulate.cluster.channel import CONTROL, Channel, Inbox
from emulate.cluster.context import HostContext
from emulate.cluster.isolation import Capability, Isolation, Links, address, isolate
from emulate.cluster.plan import FIRST_PORT, ClusterPlan, hold_ports, roles_of, tf_config
from emulate.cluster.upstream import is_runtime_initialized
from emulate.cluster.views import remove_tree
from emulate.devices import GpuShare
from emulate.errors import GpudistError, Unavailable
from emulate.faults import Board, FillDisk, HostFaults, Missing, check_disk, needs_links


@dataclass(frozen=True)
class Order:
    """Hold the supervisor's order to the keeper: the plan without its entry, which is pickled for the hosts only."""

    plan: ClusterPlan
    entry: bytes
    search_path: tuple[str, ...]
    cwd: Path
    supervisor: int
    gpus: tuple[GpuShare, ...] = ()


@dataclass(frozen=True)
class Again:
    """Hold the supervisor's order to fork the hosts again.

    Attributes:
        plan: Of the new life: it may differ in directory, environment and faults.
        entry: Its entry, pickled.
    """

    plan: ClusterPlan
    entry: bytes

    def message(self) -> bytes:
        """Return the message to send."""
        return _AGAIN + pickle.dumps(self)


_SIGNALS = {b"stacks": threads.STACK_SIGNAL, b"terminate": signal.SIGTERM}
_AGAIN = b"again "


class Wakeups:
    """Wait on sockets, on the ends of children and on the end of another process at once."""

    def __init__(self, supervisor: int) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        # Python writes to the wakeup descriptor only for signals that have a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # The socket alone would not do: a process that the supervisor forked may hold a copy of its end.
        self._supervisor, self._is_alone = _open_process(supervisor)

    def wait(self, others: Sequence[Any]) -> tuple[list[Any], bool]:
        """Return the readable ones of the others, and whether the supervisor is gone."""
        if self._is_alone:
            return [], True
        watched = [self._reader, *others, *([self._supervisor] if self._supervisor is not None else [])]
        ready = select.select(watched, (), ())[0]
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)
        return [other for other in others if other in ready], self._supervisor in ready

    def close(self) -> None:
        """Let go of everything: before the sockets are, signals must not be written to them any more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()
        if self._supervisor is not None:
            os.close(self._supervisor)


def _open_process(pid: int) -> tuple[int | None, bool]:
    """Return a descriptor that becomes readable when the process ends, and whether it has already ended."""
    try:
        return os.pidfd_open(pid), False
    except ProcessLookupError:
        return None, True
    except OSError:  # before Linux 5.3, or forbidden
        return None, False


def keep(channel: Channel, capability: Capability, *, is_preloaded: bool) -> NoReturn:
    """Be the keeper, from the fork to the end of the process."""
    try:
        _, body = channel.receive()
        order: Order = pickle.loads(body)
        _Keeper(channel, order).run(capability, is_preloaded)
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()  # the exit below would leave no word of it
    finally:
        os._exit(0)


class _Keeper:
    def __init__(self, channel: Channel, order: Order) -> None:
        self._channel = channel
        self._order = order
        self._plan = order.plan
        self._home = order.plan.directory
        self._roles = roles_of(order.plan.topology)
        self._hosts: dict[int, int] = {}  # process id: number
        self._isolation = Isolation()
        self._held_ports: list[socket.socket] = []
        self._links: Links | None = None

    def run(self, capability: Capability, is_preloaded: bool) -> None:
        system.adopt_orphans()
        signal.signal(threads.STACK_SIGNAL, signal.SIG_IGN)  # a host that is asked for its stack before it can answer must live
        try:
            fds = self._channel.receive_fds(len(self._roles) * (3 if self._plan.echo else 1))
            self._isolate(capability)
            while True:
                self._fork_hosts(fds, is_preloaded)
                hosts = {number: pid for pid, number in self._hosts.items()}
                isolation = self._isolation
                self._report({"is": "ready", "hosts": hosts, "isolation": str(isolation), "notes": isolation.notes})
                again = self._watch()
                if again is None:
                    break
                fds = self._begin_again(again)
        except GpudistError as error:
            self._report({"is": "refused", "error": error})
        finally:
            end_descendants()
            self._isolation.views.remove()
            remove_tree(self._home / "tmp")

    def _begin_again(self, again: Again) -> list[int]:
        """End this life; in the next, network, views and temporary folder are the same, with what was written there."""
        end_descendants()
        self._hosts.clear()
        self._order = replace(self._order, plan=again.plan, entry=again.entry)
        self._plan = again.plan
        self._report({"is": "again"})
        return self._channel.receive_fds(len(self._roles) * (3 if self._plan.echo else 1))

    def _isolate(self, capability: Capability) -> None:
        topology = self._plan.topology
        network = self._plan.network if topology.has_several_hosts and not topology.is_virtual else None
        self._isolation = isolate(capability, network=network, folders=self._plan.views, directory=self._plan.directory)
        if any(isinstance(fault, FillDisk) for fault in self._plan.faults):
            check_disk()
        if needs_links(self._plan.faults):
            self._lay_links(capability)

    def _lay_links(self, capability: Capability) -> None:
        if not self._isolation.own_network:
            raise Unavailable(
                "Links that can be cut, slowed down or lossy need a network of the cluster's own. Received: "
                f"network={self._plan.network!r}, {capability.network or 'which is shared'}. "
                "Take --network own where the system allows it, or leave faults of links out."
            )
        self._links = Links.lay(len(self._roles))

    def _fork_hosts(self, fds: list[int], is_preloaded: bool) -> None:
        assert not is_runtime_initialized(), "TensorFlow's runtime was initialised before a fork"
        places = self._places()
        channels = [Channel(socket.socket(fileno=fd)) for fd in fds[: len(self._roles)]]
        outputs = [(fds[at], fds[at + 1]) for at in range(len(self._roles), len(fds), 2)]
        (self._home / "tmp").mkdir(exist_ok=True)
        parent = os.getpid()
        board = Board(len(self._roles))
        if self._links is not None:
            self._links.start_switch(board, list(self._plan.faults_to_come.values()))
        missing = {fault.host for fault in self._plan.faults_to_come.values() if isinstance(fault, Missing)}
        for number, channel in enumerate(channels):
            if number in missing:
                continue
            settings = self._settings(places, number, is_preloaded, board)
            pid = os.fork()
            if pid == 0:
                self._channel.close()
                if self._links is not None:
                    self._links.enter(number)
                for end in [*(c.socket for c in channels if c is not channel), *self._held_ports]:
                    end.close()
                for fd in (fd for pair in outputs[:number] + outputs[number + 1 :] for fd in pair):
                    os.close(fd)
                context, output = self._context(number, channel), outputs[number] if outputs else None
                if self._plan.own_hashes and number:
                    host.run_in_own_interpreter(settings, context, output, parent)
                host.run(settings, context, output, parent)
            self._hosts[pid] = number
        for channel in channels:
            channel.close()
        for pair in outputs:
            os.close(pair[0])
            os.close(pair[1])

    def _places(self) -> list[str]:
        """Return the addresses and ports of the hosts' servers."""
        numbers = range(len(self._roles))
        if self._links is not None:
            return [f"{address(number)}:{FIRST_PORT}" for number in numbers]
        if self._isolation.own_network:
            return [f"127.0.0.1:{FIRST_PORT + number}" for number in numbers]
        self._held_ports = hold_ports(len(self._roles))
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in self._held_ports]

    def _settings(self, places: list[str], number: int, is_preloaded: bool, board: Board) -> host.HostSettings:
        plan = self._plan
        return host.HostSettings(
            topology=plan.topology,
            all_reduce=plan.all_reduce,
            reference=plan.reference,
            gpus=self._gpus_of(number),
            entry=self._order.entry,
            environment={**plan.environment, **self._gpu_environment(number), "TMPDIR": str(self._home / "tmp")},
            search_path=self._order.search_path,
            cwd=self._order.cwd,
            tf_config=tf_config(*self._of_virtual_hosts(places), plan.virtual_host or number),
            sets_tf_config=self._plan.sets_tf_config,
            is_preloaded=is_preloaded,
            emulated=plan.emulated,
            waits_for_others=len(self._roles) > 1,
            faults=HostFaults(number, plan.faults_to_come, board),
        )

    def _of_virtual_hosts(self, places: list[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return roles and places, those of virtual hosts too, which nobody reaches."""
        topology = self._plan.topology
        if not topology.is_virtual:
            return self._roles, places
        return ("worker",) * topology.num_hosts, [f"127.0.0.1:{FIRST_PORT + host}" for host in range(topology.num_hosts)]

    def _gpus_of(self, number: int) -> GpuShare | None:
        """Return the GPUs of a host that trains; None for a chief and for parameter servers."""
        index = self._roles[:number].count("worker")
        return self._order.gpus[index] if self._order.gpus and self._roles[number] == "worker" else None

    def _gpu_environment(self, number: int) -> dict[str, str]:
        """Read by CUDA when a host first asks for its GPUs, which nobody has done before the fork.

        A plain program has all that this process sees: they are held for it.
        """
        gpus = self._gpus_of(number) if self._plan.emulated else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}

    def _context(self, number: int, channel: Channel) -> HostContext:
        directory = self._plan.directory / f"host-{number}"
        own = self._isolation.own_network
        return HostContext(self._plan.topology, number, self._roles[number], directory, channel, self._isolation.views, own)

    def _watch(self) -> Again | None:
        """Report the ends of hosts and answer, until told to end or to begin again, or the supervisor is gone."""
        inbox = Inbox()
        with contextlib.closing(Wakeups(self._order.supervisor)) as wakeups:
            self._reap()  # what ended before the line above sends no signal any more
            while not inbox.is_closed:
                _, is_alone = wakeups.wait([self._channel.socket])
                self._reap()
                if is_alone:
                    return None
                for _, body in inbox.receive(self._channel.socket):
                    if body == b"end" or body.startswith(_AGAIN):
                        return None if body == b"end" else pickle.loads(body[len(_AGAIN) :])
                    self._answer(body)
        return None

    def _reap(self) -> None:
        while (ended := wait_for_any(os.WNOHANG)) is not None and ended[0]:
            number = self._hosts.pop(ended[0], None)
            if number is not None:
                self._report({"is": "exit", "host": number, "code": os.waitstatus_to_exitcode(ended[1])})

    def _answer(self, body: bytes) -> None:
        if body in _SIGNALS:
            for pid in self._hosts:  # not reaped yet, so the numbers are theirs
                os.kill(pid, _SIGNALS[body])
        elif body.startswith(b"continue"):
            for pid in self._pids_of(int(body.split()[1])):
                os.kill(pid, signal.SIGCONT)

    def _pids_of(self, number: int) -> list[int]:
        return [pid for pid, host_number in self._hosts.items() if host_number == number]

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(CONTROL, pickle.dumps(message))


def wait_for_any(options: int) -> tuple[int, int] | None:
    """Wait as os.waitpid(-1) does; return None without children."""
    try:
        return os.waitpid(-1, options)
    except OSError as error:
        if error.errno != errno.ECHILD:
            raise
        return None


def end_descendants() -> None:
    """Kill all children, and theirs, which become ours as their parents end, until none is left."""
    me = os.getpid()
    while (ended := wait_for_any(os.WNOHANG)) is not None:
        if ended[0]:
            continue
        for pid in system.children_of(me):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for_any(0)
