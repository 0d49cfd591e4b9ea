"""Guard a cluster: only the process that made it can use and end it, not a process forked from that one."""

from __future__ import annotations

import os
from typing import final

from emulate.errors import UsageError


@final
class Owner:
    """Remember the process that made something."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return whether this is that process, not one forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Refuse the use in a process that was forked.

        Args:
            what: What it owns, for the message: `A cluster`.

        Raises:
            UsageError: In another process.
        """
        if not self.is_here:
            raise UsageError(
                f"{what} serves the process that made it. Received: process={os.getpid()}, which was forked from "
                f"{self._pid}. Make another one in this process, or use it in that one."
            )
