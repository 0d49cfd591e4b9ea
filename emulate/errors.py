"""Define the errors that gpudist raises, each with the exit code of the command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GpudistError(Exception):
    """Report any error that gpudist raises on purpose. Its text is all that a user sees."""

    exit_code = 70


class UsageError(GpudistError, ValueError):
    """Report a usage error: the text says what must hold, what was received and what to do."""

    exit_code = 2


WrongUse = UsageError  # the name in 0.1


class Unavailable(GpudistError):
    """Report that this machine cannot provide what was asked for."""

    exit_code = 5


class Interrupted(GpudistError):
    """Report Ctrl-C."""

    exit_code = 130


class ByDesignWarning(UserWarning):
    """Warn of a program that differs from one device only by design of TensorFlow and Keras (the verdict `by-design`)."""


class ProgramFailed(GpudistError):
    """Report that the user's program raised.

    Args:
        message: The text for the user.
        host: The number of the host on which it raised first.
        traceback_text: The program's own traceback, without frames of gpudist.
    """

    exit_code = 3

    def __init__(self, message: str, *, host: int, traceback_text: str) -> None:
        super().__init__(message)
        self.host = host
        self.traceback_text = traceback_text


class Hung(GpudistError):
    """Report that the user's program stopped making progress, or ran out of time.

    Args:
        message: The text for the user.
        reason: `hang` (no live host can continue) or `timeout`.
        stacks: The Python stack of each host, by host number.
    """

    exit_code = 4

    def __init__(self, message: str, *, reason: str, stacks: dict[int, str]) -> None:
        super().__init__(message)
        self.reason = reason
        self.stacks = stacks


def did_you_mean(name: str, possible: Iterable[str], cutoff: float = 0.7) -> str:
    """Return `Did you mean 'x'?` for the nearest one, or those of which the name is a part; empty where there is none."""
    word, all_of = name.strip().lower().replace("_", "-"), list(possible)
    near = difflib.get_close_matches(word, all_of, n=1, cutoff=cutoff) or [
        one for one in all_of if len(word) > 2 and word in one
    ]
    return f"Did you mean {' or '.join(map(repr, near[:3]))}?" if near else ""
