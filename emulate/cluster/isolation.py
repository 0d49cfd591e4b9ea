"""Isolate the keeper of a cluster and its hosts: a private network and copy-on-write views of folders.

In a private network hosts have names, as real ones have: a hosts file and a host name of each.

Links between hosts can be cut, slowed down and made lossy. For that each host has a network namespace of its own with one
device, and a process of the keeper passes packets from one to the other. That needs nothing of the kernel but TUN devices; what
the kernel itself could do (`netem`) is missing in many.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.cluster import system
from emulate.cluster.context import HostContext
from emulate.cluster.views import Views
from emulate.errors import Unavailable
from emulate.faults import Board, Fault, Link
from emulate.told import Told, told


@dataclass(frozen=True)
class Capability:
    """Describe what this system lets gpudist isolate.

    Attributes:
        flags: What has to be given to `unshare` besides the namespaces themselves (0 for root, else a user namespace);
            None where namespaces are refused.
        network: Why there can be no network of its own; empty where there can.
        overlay: Why there can be no overlay mounts; empty where there can.
    """

    flags: int | None
    network: str = ""
    overlay: str = ""


_UNPROTECTED = (
    "Ports are reserved until the run ends, so that runs do not collide. Nothing else protects them: TensorFlow's servers "
    "listen on all interfaces and have no authentication. During the run, anyone who can reach this machine can run "
    "operations, and read and write files, as its user."
)


@dataclass
class Isolation:
    """Describe the isolation of a cluster."""

    own_network: bool = False
    notes: list[Told] = field(default_factory=list)
    views: Views = field(default_factory=Views)

    def __str__(self) -> str:
        return f"{'own network' if self.own_network else 'host network'}, {self.views}"


def find_capability() -> Capability:
    """Try out, in children that end at once, what the system allows: a namespace that was entered cannot be left."""
    if sys.platform != "linux":
        return Capability(None, "only Linux has namespaces", "only Linux has namespaces")
    tried = [_try(flags) for flags in ((0,) if os.geteuid() == 0 else ()) + (system.CLONE_NEWUSER,)]
    return min(tried, key=lambda capability: bool(capability.network) + bool(capability.overlay))


def _try(flags: int) -> Capability:
    network, overlay = _refusal(flags, lambda flags: enter(flags | system.CLONE_NEWNET)), _refusal(flags, _use_overlay)
    return Capability(None if network and overlay else flags, network, overlay)


def _refusal(flags: int, use: Callable[[int], None]) -> str:
    """Return why a namespace cannot be used; empty if it can. The check runs in a child, because there is no way back."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)
            use(flags)
            os.write(writer, b"ok")
        except OSError as error:
            os.write(writer, str(error.strerror or error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read().replace("\n", " ")
    os.waitpid(pid, 0)
    return "" if text == "ok" else text or "the attempt ended without an answer"


def enter(flags: int) -> None:
    """Leave the namespaces for new ones and keep one's identity."""
    uid, gid = os.getuid(), os.getgid()
    system.unshare(flags)
    if flags & system.CLONE_NEWUSER:
        # Since Linux 3.19 an unprivileged process may write gid_map only after this (user_namespaces(7)).
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if flags & system.CLONE_NEWNS:
        # Where `/` is shared, as systemd makes it, root's mounts would show in the whole system.
        system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
    if flags & system.CLONE_NEWNET:
        system.bring_up(b"lo")


def _use_overlay(flags: int) -> None:
    enter(flags | system.CLONE_NEWNS)
    place = Path(tempfile.gettempdir())
    system.mount("tmpfs", str(place), "tmpfs")
    for name in ("lower", "upper", "work"):
        (place / name).mkdir()
    options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    # Only root outside of user namespaces may write the `trusted.*` attributes of an overlay: `userxattr` is of Linux 5.11.
    system.mount("overlay", str(place / "lower"), "overlay", 0, options + (",userxattr" if flags else ""))
    (place / "lower" / "file").touch()


def describe_isolation() -> dict[str, dict[str, Any]]:
    """Describe what this system lets clusters isolate, and what protects the ports of their hosts.

    Returns:
        For `own_network`, `copy_on_write` and `faults_of_links`: `available` and, where not, `why`; for `own_network` also
        `ports`.

    Example:
        >>> sorted(describe_isolation())
        ['copy_on_write', 'faults_of_links', 'own_network']
    """
    capability = find_capability()
    no_links = capability.network or why_no_devices()
    inside = "The ports of several hosts are in a private network, which other machines and users cannot reach."
    ports = _UNPROTECTED if capability.network else inside
    return {
        "own_network": {"available": not capability.network, "why": capability.network or None, "ports": ports},
        "copy_on_write": {"available": not capability.overlay, "why": capability.overlay or None},
        "faults_of_links": {"available": not no_links, "why": no_links or None},
    }


def isolate(capability: Capability, *, network: str | None, folders: tuple[Path, ...], directory: Path) -> Isolation:
    """Isolate this process and those it forks from now on; it must have one thread.

    Args:
        capability: What the system allows.
        network: `own` or `host`, as it is wanted for several hosts; None for one, which needs none.
        folders: Folders that get a copy-on-write view.
        directory: The run's folder, which stays real wherever it lies.

    Returns:
        What is in force now.

    Raises:
        Unavailable: When a folder is too large for the working copy that has to take a view's place.
    """
    isolation = Isolation(own_network=network == "own" and capability.flags is not None and not capability.network)
    if network and not isolation.own_network:
        why = "it was asked for" if network == "host" else f"the system refuses them one of their own ({capability.network})"
        isolation.notes.append(told("shared-network")(f"The hosts share this machine's network: {why}. {_UNPROTECTED}"))
    overlay = bool(folders) and capability.flags is not None and not capability.overlay
    flags = (system.CLONE_NEWNET if isolation.own_network else 0) | (system.CLONE_NEWNS if overlay else 0)
    if flags:
        enter(flags | (capability.flags or 0))
    isolation.views = Views(directory, in_user_namespace=bool(capability.flags))
    isolation.notes += isolation.views.show(folders, "" if overlay else capability.overlay)
    return isolation


def take_names(context: HostContext, names: Sequence[Sequence[str]]) -> None:
    """Give this process the name of its host, and let it find all hosts by their names.

    Args:
        context: This host.
        names: The names of each host; the last one is the name that the host itself sees.

    Raises:
        Unavailable: If the hosts have no private network, or the system refuses the mount.
    """
    file = context.directory / "hosts"
    lines = ["127.0.0.1 localhost", *(f"127.0.0.1 {' '.join(own)}" for own in names)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not context.has_own_network:
        raise Unavailable(
            "Hosts with names need a private network. Received: this system refuses one. 'gpudist devices' says why."
        )
    try:
        enter(system.CLONE_NEWNS | system.CLONE_NEWUTS)
        system.mount(str(file), "/etc/hosts", None, system.MS_BIND)
        socket.sethostname(names[context.host][-1])
    except OSError as error:
        raise Unavailable(f"Hosts with names need a hosts file of their own. Received: {error}.") from None


_TUN = "/dev/net/tun"
_DEVICE = b"eth0"
_NETWORK = "10.77.0."
_MASK, _MTU = "255.255.255.0", 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_IPV4, _LAST_OF_DESTINATION = 4, 19


@dataclass
class Links:
    """Hold the networks of the hosts of one cluster. Its keeper makes them in a private network, with one thread.

    Attributes:
        devices: Where the packets of each host come out and go in.
        namespaces: The network of each host.
    """

    devices: list[int] = field(default_factory=list)
    namespaces: list[int] = field(default_factory=list)

    @classmethod
    def lay(cls, num_hosts: int) -> Links:
        """Make the networks.

        Args:
            num_hosts: How many hosts there are.

        Returns:
            The links; every host enters its own network.

        Raises:
            Unavailable: Where the system has no TUN devices for us.
        """
        links, own = cls(), os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            for host in range(num_hosts):
                system.unshare(system.CLONE_NEWNET)
                system.bring_up(b"lo")
                links.devices.append(_make_device(address(host)))
                links.namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        except OSError as error:
            raise Unavailable(
                "Links that can be cut, slowed down or lossy need TUN devices. Received: "
                f"{error.filename or _TUN}: {error.strerror}. In a container allow the device "
                "(docker run --device /dev/net/tun), or leave faults of links out."
            ) from None
        finally:
            system.set_namespace(own, system.CLONE_NEWNET)
            os.close(own)
        return links

    def enter(self, host: int) -> None:
        """Move a host's process to its network."""
        system.set_namespace(self.namespaces[host], system.CLONE_NEWNET)
        self.close()

    def start_switch(self, board: Board, faults: Sequence[Fault]) -> None:
        """Fork the process that passes packets on; it ends with the keeper's other children."""
        parent = os.getpid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                system.die_with_parent(parent)
                _Switch(self.devices, board, [fault for fault in faults if isinstance(fault, Link)]).run()
            os._exit(0)

    def close(self) -> None:
        """Let go of all descriptors."""
        for fd in (*self.devices, *self.namespaces):
            os.close(fd)
        self.devices, self.namespaces = [], []


def address(host: int) -> str:
    """Return a host's address in the networks with links."""
    return f"{_NETWORK}{host + 1}"


def why_no_devices() -> str:
    """Return why TUN devices are not available; empty if they are."""
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        return f"{_TUN}: {error.strerror}"
    return ""


def _make_device(own: str) -> int:
    import fcntl

    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    # Without IFF_NO_PI the kernel puts four bytes of its own before each packet.
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, text in ((_SIOCSIFADDR, own), (_SIOCSIFNETMASK, _MASK)):
            packed = struct.pack("16sHH4s16x", _DEVICE, socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(sock, request, packed)
        fcntl.ioctl(sock, _SIOCSIFMTU, struct.pack("16si20x", _DEVICE, _MTU))
    system.bring_up(_DEVICE)
    return fd


class _Switch:
    """Pass packets on, with a delay or not at all, as the faults say."""

    def __init__(self, devices: Sequence[int], board: Board, links: Sequence[Link]) -> None:
        self._devices = devices
        self._board = board
        of_hosts = [[link for link in links if link.host in (None, host)] for host in range(len(devices))]
        self._latency = [max((link.latency for link in own), default=0.0) for own in of_hosts]
        self._loss = [max((link.loss for link in own), default=0.0) for own in of_hosts]
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._random = random.Random(0)

    def run(self) -> None:
        """Run forever."""
        hosts = {fd: host for host, fd in enumerate(self._devices)}
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for fd in select.select(self._devices, (), (), pause)[0]:
                self._take(hosts[fd])
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, host, packet = heapq.heappop(self._waiting)
                self._deliver(host, packet)

    def _take(self, sender: int) -> None:
        with contextlib.suppress(BlockingIOError):
            packet = os.read(self._devices[sender], 1 << 16)
            host = packet[_LAST_OF_DESTINATION] - 1 if packet and packet[0] >> 4 == _IPV4 else -1
            if not 0 <= host < len(self._devices) or self._board.is_down(sender) or self._random.random() < self._loss[sender]:
                return
            if not self._latency[sender]:
                self._deliver(host, packet)
                return
            self._count += 1
            heapq.heappush(self._waiting, (time.monotonic() + self._latency[sender], self._count, host, packet))

    def _deliver(self, host: int, packet: bytes) -> None:
        if not self._board.is_down(host):
            with contextlib.suppress(OSError):  # a full queue loses it, as real ones do
                os.write(self._devices[host], packet)
