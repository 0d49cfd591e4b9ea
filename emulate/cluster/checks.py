"""Check the arguments of a call before anything is started, and who makes it.

Only the process that made a cluster can use and end it, not a process forked from that one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from emulate.errors import UsageError


def check_function(function: object) -> None:
    """Refuse what cannot be called.

    Args:
        function: What hosts are to run.

    Raises:
        UsageError: When it cannot be called.
    """
    if not callable(function):
        raise UsageError(
            f"What hosts run must be callable. Received: function={function!r}. "
            "Give a function; `gpudist run` and emulate.verify take files."
        )


def check_time_limit(timeout: object) -> None:
    """Refuse what is no time limit.

    Args:
        timeout: Seconds, or None.

    Raises:
        UsageError: When it is no positive number.
    """
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"A time limit must be a positive number. Received: timeout={timeout!r}. Use None for no limit.")


def checked_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment variables for the hosts.

    Args:
        environment: Their values by name; None for none.

    Returns:
        A copy of it.

    Raises:
        UsageError: When it is no mapping of texts.
    """
    if environment is None:
        return {}
    if not isinstance(environment, Mapping):
        raise UsageError(
            f"An environment must have a text for each name. Received: environment={environment!r}. Give a dict of texts."
        )
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(
                f"An environment must have a text for each name. Received: environment={{{name!r}: {value!r}}}. "
                f"Write it as {{{str(name)!r}: {str(value)!r}}}."
            )
    return dict(environment)


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
