"""Share the state of a cluster's hosts at once, in a page of shared memory."""

from __future__ import annotations

import mmap
import struct
import time

_ENTERED, _DOWN = struct.Struct("<q"), struct.Struct("<d")
_SIZE = _ENTERED.size + _DOWN.size


class Board:
    """Hold the shared page. It is made before the hosts are forked; each host writes only its own place.

    Args:
        num_hosts: How many there are.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._memory = mmap.mmap(-1, max(1, num_hosts) * _SIZE)

    def enter(self, host: int, step: int) -> None:
        """Record that the host is in the all-reduce of a step."""
        _ENTERED.pack_into(self._memory, host * _SIZE, step)

    def has_peer_entered(self, host: int, step: int) -> bool:
        """Return whether another host is, or was, in the all-reduce of that step."""
        entered = (_ENTERED.unpack_from(self._memory, peer * _SIZE)[0] for peer in range(self._num_hosts) if peer != host)
        return any(peer_step >= step for peer_step in entered)

    def disconnect(self, host: int, seconds: float | None) -> None:
        """Take the host's link down for some seconds, or forever."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        _DOWN.pack_into(self._memory, host * _SIZE + _ENTERED.size, until)

    def is_down(self, host: int) -> bool:
        """Return whether the host's link is down."""
        until: float = _DOWN.unpack_from(self._memory, host * _SIZE + _ENTERED.size)[0]
        return until > 0 and time.monotonic() < until
