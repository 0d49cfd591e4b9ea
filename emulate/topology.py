"""Describe a topology: the numbers of hosts, of devices on each host, and of parameter servers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emulate.errors import UsageError

_FORM = re.compile(r"(?P<hosts>[0-9]+)x(?P<devices>[0-9]+)(?:\+(?P<ps>[0-9]+)ps)?")
MAX_HOSTS = 64
MAX_DEVICES_PER_HOST = 256
MAX_VIRTUAL = 4096
"""Replicas of a topology that take turns in one process."""
_EXAMPLES = "Write it as HxD (hosts x devices each), '1x4' or '2x2', or HxD+Pps with parameter servers, '3x1+2ps'."


@dataclass(frozen=True, order=True)
class Topology:
    """Describe the shape of a cluster, written `HxD` or `HxD+Pps`.

    Attributes:
        num_hosts: Number of hosts that train, at least 1.
        num_devices: Number of devices of each host, at least 1.
        num_ps: Number of parameter servers, 0 for none.
        is_virtual: Whether the replicas take turns in one process.

    Raises:
        UsageError: If a number is out of range.

    Example:
        >>> str(Topology.parse("2x4"))
        '2x4'
        >>> Topology.parse("2x4").num_replicas
        8
    """

    num_hosts: int
    num_devices: int
    num_ps: int = 0
    is_virtual: bool = False

    def __post_init__(self) -> None:
        hosts, devices = (MAX_VIRTUAL,) * 2 if self.is_virtual else (MAX_HOSTS, MAX_DEVICES_PER_HOST)
        self._check("hosts", self.num_hosts, 1, hosts)
        self._check("devices per host", self.num_devices, 1, devices)
        if self.is_virtual:
            self._check("virtual replicas", self.num_replicas, 1, MAX_VIRTUAL)
        self._check("parameter servers", self.num_ps, 0, MAX_HOSTS)

    def _check(self, what: str, number: int, lowest: int, highest: int) -> None:
        if not lowest <= number <= highest:
            raise UsageError(
                f"A topology has {lowest} to {highest} {what}. Received: topology='{self}' with {number} {what}. {_EXAMPLES}"
            )

    @classmethod
    def parse(cls, text: str | Topology, *, is_virtual: bool = False) -> Topology:
        """Parse `HxD` or `HxD+Pps`.

        Args:
            text: The text. A Topology is returned unchanged.
            is_virtual: Whether the replicas take turns in one process.

        Returns:
            The topology.

        Raises:
            UsageError: If the text has another form or a number is out of range.
        """
        if isinstance(text, Topology):
            return text
        match = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            hint = _hint(text.strip()) if isinstance(text, str) else ""
            raise UsageError(f"A topology has the form HxD or HxD+Pps. Received: topology={text!r}. {hint}{_EXAMPLES}")
        return cls(int(match["hosts"]), int(match["devices"]), int(match["ps"] or 0), is_virtual)

    @property
    def num_replicas(self) -> int:
        """Return how many copies of the model a data-parallel program trains here."""
        return self.num_hosts * self.num_devices

    @property
    def has_several_hosts(self) -> bool:
        """Return whether a program needs TF_CONFIG to use all of it."""
        return self.num_hosts > 1 or self.num_ps > 0

    @property
    def num_stepping_hosts(self) -> int:
        """Return how many hosts (the first ones) make the program's steps. With parameter servers only the chief does.

        Virtual hosts are one process.
        """
        return 1 if self.num_ps or self.is_virtual else self.num_hosts

    def __str__(self) -> str:
        return f"{self.num_hosts}x{self.num_devices}" + (f"+{self.num_ps}ps" if self.num_ps else "")


def _hint(text: str) -> str:
    """Return what a text was probably meant to be: the numbers in it, in the right form."""
    each, numbers = re.split(r"[,;\s]+", text.lower()), re.findall(r"[0-9]+", text)
    if len(each) > 1 and all(map(_FORM.fullmatch, each)):
        return f"Give each topology by itself: {' '.join(f'--topology {one}' for one in each)}. "
    if len(numbers) == 1 and text == numbers[0]:
        return f"Did you mean '1x{text}' (one host with {text} devices) or '{text}x1' ({text} hosts with one device)? "
    if len(numbers) < 2 or re.search("[-.]", text):
        return ""
    servers = f"+{numbers[2]}ps" if numbers[2:] and "+" in text else ""
    return f"Did you mean '{numbers[0]}x{numbers[1]}{servers}'? "


REFERENCE = Topology(1, 1)
REFERENCE_WITH_SERVERS = Topology(1, 1, 1)
"""Reference topology of a program with parameter servers, which needs at least one worker and one server."""
