"""What the hosts of a cluster know of each other at once: a page of memory that they share."""

from __future__ import annotations

import mmap
import struct
import time

_ENTERED, _DOWN = struct.Struct("<q"), struct.Struct("<d")
_SIZE = _ENTERED.size + _DOWN.size


class Board:
    """Made before the hosts are forked; each writes only its own place.

    Args:
        num_hosts: How many there are.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._memory = mmap.mmap(-1, max(1, num_hosts) * _SIZE)

    def enter(self, host: int, step: int) -> None:
        """The host is in the all-reduce of a step."""
        _ENTERED.pack_into(self._memory, host * _SIZE, step)

    def has_peer_entered(self, host: int, step: int) -> bool:
        """Whether another host is in the all-reduce of that step, or was."""
        entered = (_ENTERED.unpack_from(self._memory, peer * _SIZE)[0] for peer in range(self._num_hosts) if peer != host)
        return any(one >= step for one in entered)

    def disconnect(self, host: int, seconds: float | None) -> None:
        """The host's link is down for some seconds, or for ever."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        _DOWN.pack_into(self._memory, host * _SIZE + _ENTERED.size, until)

    def is_down(self, host: int) -> bool:
        """Whether the host's link is down."""
        until: float = _DOWN.unpack_from(self._memory, host * _SIZE + _ENTERED.size)[0]
        return until > 0 and time.monotonic() < until
