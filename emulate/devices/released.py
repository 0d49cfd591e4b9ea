"""Wait for memory that the driver frees late: it may take seconds after a process has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from emulate.devices.inventory import Inventory

PATIENCE = 5.0
_PAUSE = 0.25
_let_go_at = float("-inf")


def gpus_let_go() -> None:
    """Record that a cluster of this process with GPUs has ended."""
    global _let_go_at
    _let_go_at = time.monotonic()


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
