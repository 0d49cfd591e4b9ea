"""Relay the output of hosts: unchanged from one host, line by line with its name from several."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from emulate.cluster.plan import host_name


class OutputRelay:
    """Relay the output of the hosts of one cluster.

    Args:
        roles: The role of each host.

    Attributes:
        fds: Standard output and standard error for each host, host after host.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self._pipes: list[tuple[int, str, int]] = []  # where to read, what to put in front, where to write
        self._rests: dict[int, bytes] = {}
        self.fds: list[int] = []
        self._ended: set[int] = set()
        if len(roles) == 1:
            self.fds = [1, 2]  # a terminal stays a terminal
            return
        for number in range(len(roles)):
            for target in (1, 2):
                reader, writer = os.pipe()
                os.set_blocking(reader, False)
                self._pipes.append((reader, f"[{host_name(roles, number)}] ", target))
                self.fds.append(writer)

    def close_their_ends(self) -> None:
        """Close what was handed to the hosts."""
        for fd in self.fds if self._pipes else ():  # a single host has this process's own
            os.close(fd)
        self.fds = []

    @property
    def readers(self) -> list[int]:
        """Return the file descriptors that become readable when a host writes."""
        return [reader for reader, _, _ in self._pipes]

    def pass_on(self) -> list[int]:
        """Pass on the lines that are complete; the readers that have come to their end with this."""
        closed = []
        for reader, prefix, target in self._pipes:
            with contextlib.suppress(BlockingIOError):
                while arrived := os.read(reader, 1 << 16):
                    *lines, rest = (self._rests.get(reader, b"") + arrived).split(b"\n")
                    self._rests[reader] = rest
                    self._write(prefix, lines, target)
                if reader not in self._ended:
                    self._ended.add(reader)
                    closed.append(reader)
        return closed

    def _write(self, prefix: str, lines: list[bytes], target: int) -> None:
        stream = sys.stdout if target == 1 else sys.stderr
        for line in lines:
            stream.write(f"{prefix}{line.decode('utf-8', 'replace')}\n")
        stream.flush()

    def close(self) -> None:
        """Pass on what is left and close."""
        self.close_their_ends()
        self.pass_on()
        for reader, prefix, target in self._pipes:
            if rest := self._rests.pop(reader, b""):
                self._write(prefix, [rest], target)
            os.close(reader)
        self._pipes = []
