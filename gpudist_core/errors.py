"""Define the errors that gpudist_core raises on purpose, and check numbers that a user passes.

The text of most errors names the rule, the received value and the fix. Numbers are Python's or NumPy's, but no bool. A
preempted run ends by an error, too.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np


class UsageError(ValueError):
    """Report an argument, a setting or a call that is not valid.

    The text has the form `<rule>. Received: <name>=<value>. <advice>`.

    Args:
        rule: What must hold, without its full stop. A rule alone is the whole text (Keras and pickle copy errors that way).
        advice: What to do, as a full sentence. Leave it out if the rule says it.
        **received: The values that break the rule, under the names that the user gave them.

    Example:
        >>> str(UsageError("keep must be a positive integer", keep=0))
        'keep must be a positive integer. Received: keep=0.'
    """

    def __init__(self, rule: str, advice: str = "", /, **received: object) -> None:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        super().__init__(f"{rule}. Received: {values}. {advice}".rstrip() if advice or received else rule)


WrongUse = UsageError  # the name in 0.1


class Unavailable(RuntimeError):
    """Report something that this machine, or this version of TensorFlow, cannot provide. The text says why and what works."""


EXIT_CODE = 75


class SaveFailed(RuntimeError):
    """Report that a checkpoint could not be written.

    Nothing of it is left, earlier ones are intact, and training may continue.
    """


class CheckpointRefused(RuntimeError):
    """Report that there are checkpoints, but none can be used. The text gives the reason for each."""


class FolderInUse(RuntimeError):
    """Report that another run writes its checkpoints into the folder."""


class HostMissing(RuntimeError):
    """Report that a host did not take part in time in something that all hosts must do together. The text names the host."""


class Preempted(SystemExit):
    """End a run that got a signal: its state is saved on all hosts at the same step, and the exit code is 75.

    It is a `SystemExit`. Uncaught, it ends the process with that code (`EX_TEMPFAIL`, "try again"). `except Exception` does not
    catch it.

    Args:
        text: The message.
        step: The step at which every host stopped.
        path: The checkpoint to continue from, or None.
    """

    def __init__(self, text: str, *, step: int, path: Path | None) -> None:
        super().__init__(text)
        self.code = EXIT_CODE
        self.step = step
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class Damaged(Exception):
    """Report that the files of a checkpoint are not what was written."""


class Foreign(Exception):
    """Report that a checkpoint is complete, but belongs to another run."""


def refusal(folder: Path, reasons: Mapping[str, str]) -> str:
    """Return the message for a folder in which no checkpoint can be used.

    Args:
        folder: The folder.
        reasons: The reason for each checkpoint, by name, the newest first.

    Returns:
        The text.
    """
    return (
        f"A checkpoint must be complete and belong to this model. Received: folder={str(folder)!r}, {listed(reasons)}. "
        "Fix the cause, or use another folder to start from scratch."
    )


def listed(reasons: Mapping[str, Any]) -> str:
    """Return names and reasons in one line."""
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def is_whole(value: Any, least: float = -math.inf) -> TypeGuard[int]:
    """Return whether a value is an integer that is at least `least`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_choice(possible: tuple[str, ...], **argument: str) -> None:
    """Refuse an argument that is none of the possible ones.

    Args:
        possible: The possible values.
        **argument: The value, under its name.

    Raises:
        UsageError: If it is another one.
    """
    [(name, value)] = argument.items()
    if value not in possible:
        raise UsageError(f"{name} must be {' or '.join(map(repr, possible))}", **argument)


def in_type(values: Any, kind: Any) -> Any:
    """Convert an array to another dtype if that dtype can hold all its values.

    An integer dtype cannot hold 0.5, and int8 cannot hold 300. Floats are rounded.

    Args:
        values: An array.
        kind: The NumPy dtype; `object` for strings.

    Returns:
        The converted array (the same object if the dtype is equal), or None if the dtype cannot hold all values.
    """
    if kind is object:
        return values if all(isinstance(value, (str, bytes)) for value in values.flat) else None
    if values.dtype.kind in "OSUM" or (values.dtype.kind == "c" and np.dtype(kind).kind != "c"):
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        converted = values.astype(kind, copy=False)
        return converted if converted is values or converted.dtype.kind not in "iub" or (converted == values).all() else None
