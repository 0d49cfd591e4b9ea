"""Emulate links between hosts that can be cut, slowed down and made lossy: a network for each host, and a switch.

Each host has a network namespace of its own with one device, and a process of the keeper passes packets from one to the other.
That needs nothing of the kernel but TUN devices; what the kernel itself could do (`netem`) is missing in many.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from emulate.cluster import system
from emulate.errors import Unavailable
from emulate.faults import Board, Fault, Link

_TUN = "/dev/net/tun"
_DEVICE = b"eth0"
_NETWORK = "10.77.0."
_MASK, _MTU = "255.255.255.0", 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
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
        links = cls()
        try:
            with _coming_back():
                for host in range(num_hosts):
                    system.unshare(system.CLONE_NEWNET)
                    system.bring_up_loopback()
                    links.devices.append(_make_device(address(host)))
                    links.namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        except OSError as error:
            raise Unavailable(
                "Links that can be cut, slowed down or lossy need TUN devices. Received: "
                f"{error.filename or _TUN}: {error.strerror}. In a container allow the device "
                "(docker run --device /dev/net/tun), or leave faults of links out."
            ) from None
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
                _Switch(self.devices, board, _slowest(faults, len(self.devices))).run()
            os._exit(0)

    def close(self) -> None:
        """Let go of all descriptors."""
        for fd in (*self.devices, *self.namespaces):
            os.close(fd)
        self.devices, self.namespaces = [], []


def address(host: int) -> str:
    """Return a host's address in the networks with links."""
    return f"{_NETWORK}{host + 1}"


@contextlib.contextmanager
def _coming_back() -> Iterator[None]:
    """Return to the network that one is in."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        system.set_namespace(home, system.CLONE_NEWNET)
        os.close(home)


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
        flags = struct.unpack_from("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", _DEVICE, 0)))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", _DEVICE, flags | _IFF_UP))
    return fd


def _slowest(faults: Sequence[Fault], num_hosts: int) -> Mapping[int, tuple[float, float]]:
    """Return the latency and loss of each host's packets."""
    links = [fault for fault in faults if isinstance(fault, Link)]
    own = {host: [link for link in links if link.host in (None, host)] for host in range(num_hosts)}
    return {
        host: (max((link.latency for link in host_links), default=0.0), max((link.loss for link in host_links), default=0.0))
        for host, host_links in own.items()
    }


class _Switch:
    """Pass packets on, with a delay or not at all, as the faults say."""

    def __init__(self, devices: Sequence[int], board: Board, links: Mapping[int, tuple[float, float]]) -> None:
        self._devices = devices
        self._board = board
        self._links = links
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
            latency, loss = self._links[sender]
            if not 0 <= host < len(self._devices) or self._board.is_down(sender) or self._random.random() < loss:
                return
            if not latency:
                self._deliver(host, packet)
                return
            self._count += 1
            heapq.heappush(self._waiting, (time.monotonic() + latency, self._count, host, packet))

    def _deliver(self, host: int, packet: bytes) -> None:
        if not self._board.is_down(host):
            with contextlib.suppress(OSError):  # a full queue loses it, as real ones do
                os.write(self._devices[host], packet)
