"""Reserve a GPU for one cluster at a time: slices are computed from free memory, which two clusters must not count at once.

The driver frees memory late: it may take seconds after a process has ended, which are waited for.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from emulate.devices.inventory import Inventory
from emulate.errors import Unavailable

_POLL_SECONDS = 0.02
_mine: dict[str, int] = {}  # GPU: the thread of this process that holds it


@final
class GpuLease:
    """Hold GPUs for one cluster against every other process of this machine. The lease ends with this process.

    Each GPU is a name in Linux's abstract socket namespace: nothing is left behind on disk, whatever ends the process.

    Args:
        uuids: Which GPUs.
        patience: Seconds to wait for those who hold them.
        ask: Called while one is held: who does not need it may let it go.

    Raises:
        Unavailable: When they are not free in time, or when the caller's own thread holds them.
    """

    def __init__(self, uuids: Sequence[str], patience: float = 600, ask: Callable[[], None] = lambda: None) -> None:
        self._held: list[tuple[str, socket.socket]] = []
        until = time.monotonic() + patience
        try:
            for uuid in sorted(uuids):  # in one order for all, so that no two wait for each other
                self._held.append((uuid, _take(uuid, until, patience, ask)))
                _mine[uuid] = threading.get_ident()
        except BaseException:
            self.close()
            raise

    def adopt(self) -> None:
        """Make the calling thread the owner, which must not wait for itself."""
        _mine.update((uuid, threading.get_ident()) for uuid, _ in self._held)

    def close(self) -> None:
        """Let others have them."""
        global _let_go_at
        if self._held:
            _let_go_at = time.monotonic()
        while self._held:
            uuid, held = self._held.pop()
            _mine.pop(uuid, None)
            held.close()

    def __enter__(self) -> GpuLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_leased(uuid: str) -> bool:
    """Return whether a cluster of this machine holds a GPU now.

    Args:
        uuid: Which one.

    Returns:
        Whether it does; to ask takes nothing.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sock:
        try:
            sock.connect(_name(uuid))
        except OSError:
            return False
    return True


def _name(uuid: str) -> str:
    return f"\0gpudist-{uuid}" if sys.platform == "linux" else ""


def take_name(name: str) -> socket.socket | None:
    """Take a name in Linux's abstract socket namespace. It leaves no file, and is free again when its process ends, however.

    Args:
        name: The name, which begins with a null character.

    Returns:
        What holds the name until it is closed; None where another one holds it.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind(name)
    except OSError:
        sock.close()
        return None
    return sock


def _take(uuid: str, until: float, patience: float, ask: Callable[[], None]) -> socket.socket:
    while (taken := take_name(_name(uuid))) is None:
        ask()
        if _mine.get(uuid) == threading.get_ident():
            raise Unavailable(
                f"A GPU serves one cluster at a time. Received: a second cluster on GPU {uuid} beside a running one of the "
                "same thread. End the first one before."
            )
        if time.monotonic() > until:
            raise Unavailable(
                f"A GPU serves one cluster at a time. Received: GPU {uuid}, which others held for {patience:g} s. "
                "Run one after the other, or give each its own GPUs by CUDA_VISIBLE_DEVICES."
            )
        time.sleep(_POLL_SECONDS)
    return taken


PATIENCE = 5.0
_PAUSE = 0.25
_let_go_at = float("-inf")  # when a cluster of this process with GPUs has ended last


def patience_now() -> float:
    """Return for how many seconds memory of an earlier cluster of this process may still come back."""
    return max(0.0, _let_go_at + PATIENCE - time.monotonic())


def ask_until(ask: Callable[[], Inventory], suffices: Callable[[Inventory], bool], patience: float) -> Inventory:
    """Ask which GPUs there are, and again while they do not suffice.

    Args:
        ask: `find_gpus`.
        suffices: Whether it is needless to wait.
        patience: For how many seconds.

    Returns:
        The last answer.
    """
    until = time.monotonic() + patience
    while not suffices(inventory := ask()) and time.monotonic() < until:
        time.sleep(_PAUSE)
    return inventory
