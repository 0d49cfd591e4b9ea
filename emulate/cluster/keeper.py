"""Run the keeper of one cluster: isolate it, fork its hosts, report their ends, and clean up.

Three generations of processes belong to a cluster. The supervisor's pre-loaded parent (preload.py) imports TensorFlow once,
in seconds. It forks a keeper for each cluster. The keeper forks the hosts. Why is there a process between?

- Namespaces. Only a process with one thread can enter them, and none comes back. So the keeper enters a network and a view of
  the files for its cluster, and its hosts are born there. The parent stays outside, for the next cluster.
- Ends. Only a parent can reap a process. The supervisor is not the parent of hosts, and the pre-loaded parent serves all
  clusters.
- Cleaning up. What a program started must end with it, however it hides: children, daemons in sessions of their own, deaf to
  all but SIGKILL. The keeper is a subreaper (prctl), so whatever loses its parent becomes a child of the keeper. It kills its
  children until none is left (`end_descendants`).

Nothing outlives a run, whoever is killed, and with whatever signal:

- A host asks the kernel to be killed with its keeper (PR_SET_PDEATHSIG).
- The keeper watches the supervisor through a descriptor of its process (pidfd). The end of their socket would not do: a
  process that the supervisor forked may hold a copy of it.
- If the keeper itself is killed, its orphans fall to the pre-loaded parent, a subreaper as well, which ends them.
- The folders of a supervisor that was killed with all its processes are removed by the next one (parent.py).

What forces the details:

- TensorFlow's runtime does not survive a fork. A keeper has imported TensorFlow, and nothing may start its runtime before the
  hosts are forked. Assertions say so.
- The keeper waits for sockets, children and the supervisor at once, in one `select`. Python has no signalfd, so SIGCHLD
  writes to a wakeup descriptor. A child that ended before the handler was there sends no signal any more. So the keeper reaps
  once first.
- Hosts are ended with SIGKILL: TensorFlow's server handles SIGTERM, and its process lives on (2.21). SIGTERM is handed on
  only as a scheduler's notice, for programs that save.
- In a restart the hosts end, and the keeper stays. So network, views and temporary folder stay, as on a machine that is
  rented on.

Rejected: ending a process group or a session, because a daemon leaves both; closing descriptors as the only sign of an end,
for the reason above; isolation by the hosts themselves, because then each would have a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import traceback
from typing import Any, NoReturn

from emulate.cluster import host, system, threads
from emulate.cluster.channel import CONTROL, Channel, Inbox
from emulate.cluster.context import HostContext
from emulate.cluster.isolation import Capability, Isolation, Links, address, isolate
from emulate.cluster.plan import AGAIN, FIRST_PORT, Order, hold_ports, roles_of, tf_config
from emulate.cluster.upstream import is_runtime_initialized
from emulate.cluster.views import remove_tree
from emulate.errors import GpudistError, Unavailable
from emulate.faults import Board, FillDisk, HostFaults, Missing, check_disk, needs_links

_SIGNALS = {b"stacks": threads.STACK_SIGNAL, b"terminate": signal.SIGTERM}


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
        self._is_alone = False
        self._supervisor: int | None = None  # readable when the process has ended
        try:
            self._supervisor = os.pidfd_open(supervisor)
        except ProcessLookupError:
            self._is_alone = True
        except OSError:  # before Linux 5.3, or forbidden
            pass

    def wait(self, other: socket.socket) -> tuple[bool, bool]:
        """Return whether the other socket is readable, and whether the supervisor is gone."""
        if self._is_alone:
            return False, True
        watched: list[Any] = [self._reader, other, *([self._supervisor] if self._supervisor is not None else [])]
        ready = select.select(watched, (), ())[0]
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)
        return other in ready, self._supervisor in ready

    def close(self) -> None:
        """Let go of everything: before the sockets are, signals must not be written to them any more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()
        if self._supervisor is not None:
            os.close(self._supervisor)


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
        self._home = order.plan.directory  # of the first life: views and temporary folder stay there
        self._roles = roles_of(order.plan.topology)
        # Invariant: process ids with their hosts' numbers, not reaped yet, so that a signal meets no other process.
        self._hosts: dict[int, int] = {}
        self._isolation = Isolation()
        self._held_ports: list[socket.socket] = []  # bound until the end, so that nobody else gets them
        self._links: Links | None = None

    def run(self, capability: Capability, is_preloaded: bool) -> None:
        system.adopt_orphans()
        signal.signal(threads.STACK_SIGNAL, signal.SIG_IGN)  # a host that is asked for its stack before it can answer must live
        try:
            self._isolate(capability)
            while True:
                fds = self._channel.receive_fds(len(self._roles) * (3 if self._plan.echo else 1))
                self._fork_hosts(fds, is_preloaded)
                hosts = {number: pid for pid, number in self._hosts.items()}
                isolation = self._isolation
                self._report({"is": "ready", "hosts": hosts, "isolation": str(isolation), "notes": isolation.notes})
                again = self._watch()
                if again is None:
                    break
                # In the next life network, views and temporary folder are the same, with what was written there.
                end_descendants()
                self._hosts.clear()
                self._order, self._plan = again, again.plan
                self._report({"is": "again"})
        except GpudistError as error:
            self._report({"is": "refused", "error": error})
        finally:
            end_descendants()
            self._isolation.views.remove()
            remove_tree(self._home / "tmp")

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
                topology, role, directory = self._plan.topology, self._roles[number], self._plan.directory / f"host-{number}"
                views, own_network = self._isolation.views, self._isolation.own_network
                context = HostContext(topology, number, role, directory, channel, views, own_network)
                output = outputs[number] if outputs else None
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
        plan, order, roles = self._plan, self._order, self._roles
        # A chief and parameter servers have none.
        gpus = order.gpus[roles[:number].count("worker")] if order.gpus and roles[number] == "worker" else None
        environment = {**plan.environment, "TMPDIR": str(self._home / "tmp")}
        if gpus and plan.emulated:  # a plain program has all that this process sees: they are held for it
            # Read by CUDA when a host first asks for its GPUs, which nobody has done before the fork.
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus.visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if plan.topology.is_virtual:  # nobody reaches the places of its hosts
            num_hosts = plan.topology.num_hosts
            roles, places = ("worker",) * num_hosts, [f"127.0.0.1:{FIRST_PORT + host}" for host in range(num_hosts)]
        return host.HostSettings(
            order=order,
            gpus=gpus,
            environment=environment,
            tf_config=tf_config(roles, places, plan.virtual_host or number),
            is_preloaded=is_preloaded,
            faults=HostFaults(number, plan.faults_to_come, board),
        )

    def _watch(self) -> Order | None:
        """Report the ends of hosts and answer, until told to end or to begin again, or the supervisor is gone."""
        inbox = Inbox()
        with contextlib.closing(Wakeups(self._order.supervisor)) as wakeups:
            self._reap()  # what ended before the line above sends no signal any more
            while not inbox.is_closed:
                _, is_alone = wakeups.wait(self._channel.socket)
                self._reap()
                if is_alone:
                    return None
                for _, body in inbox.receive(self._channel.socket):
                    if body == b"end" or body.startswith(AGAIN):
                        return None if body == b"end" else pickle.loads(body[len(AGAIN) :])
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
            stopped = int(body.split()[1])
            for pid in (pid for pid, number in self._hosts.items() if number == stopped):
                os.kill(pid, signal.SIGCONT)

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(CONTROL, pickle.dumps(message))


def wait_for_any(options: int) -> tuple[int, int] | None:
    """Wait as os.waitpid(-1) does; return None without children."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
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
