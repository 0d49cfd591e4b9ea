"""The one tree of errors that gpudist raises, each with the exit code the command ends with."""

from __future__ import annotations


class GpudistError(Exception):
    """Any error gpudist raises on purpose; its text is all that a user sees."""

    exit_code = 70


class WrongUse(GpudistError, ValueError):
    """What was asked for cannot be meant: the text says what must hold, what was received and what to do."""

    exit_code = 2


class Unavailable(GpudistError):
    """This machine cannot provide what was asked for."""

    exit_code = 5


class ByDesignWarning(UserWarning):
    """A verified program differs from one device only by design of tf.distribute (the verdict `by-design`)."""


class ProgramFailed(GpudistError):
    """The user's program raised.

    Args:
        message: What the user sees.
        host: The number of the host on which it raised first.
        traceback_text: The program's own traceback, frames of gpudist removed.
    """

    exit_code = 3

    def __init__(self, message: str, *, host: int, traceback_text: str) -> None:
        super().__init__(message)
        self.host = host
        self.traceback_text = traceback_text


class Hung(GpudistError):
    """The user's program stopped making progress, or ran out of time.

    Args:
        message: What the user sees.
        reason: `hang` (no live host can go on) or `timeout`.
        stacks: The Python stack of each host, by host number.
    """

    exit_code = 4

    def __init__(self, message: str, *, reason: str, stacks: dict[int, str]) -> None:
        super().__init__(message)
        self.reason = reason
        self.stacks = stacks
