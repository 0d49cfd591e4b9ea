"""How saving and restoring can fail, and how a preempted run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXIT_CODE = 75


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; nothing of it is left, the ones before are intact, and training may go on."""


class CheckpointRefused(RuntimeError):
    """There are checkpoints and none can be used; the text says of each why."""


class FolderInUse(RuntimeError):
    """Another run writes its checkpoints into the folder."""


class HostMissing(RuntimeError):
    """A host did not take part in time in what all hosts must do together; the text names it."""


class Preempted(SystemExit):
    """The run was told to leave, has saved its state on all hosts at the same step, and ends with exit code 75.

    It is a `SystemExit`: uncaught, it ends the process with that code (`EX_TEMPFAIL`, "try again"), and no
    `except Exception` swallows it.

    Args:
        text: What is said.
        step: The step at which every host stopped.
        path: The checkpoint to go on from, None where there is none.
    """

    def __init__(self, text: str, *, step: int, path: Path | None) -> None:
        super().__init__(text)
        self.code = EXIT_CODE
        self.step = step
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class Damaged(Exception):
    """One checkpoint's files are not what was written."""


class Foreign(Exception):
    """One checkpoint is whole, and that of something else."""


def refusal(folder: Path, reasons: Mapping[str, str]) -> str:
    """What is said when no checkpoint can be used.

    Args:
        folder: Where they are.
        reasons: Why each was refused, by its name, the newest first.

    Returns:
        The text.
    """
    return (
        f"A checkpoint must be whole and that of this model. Received: folder={str(folder)!r}, {listed(reasons)}. "
        "Mend the cause, or name another folder to start from scratch."
    )


def listed(reasons: Mapping[str, Any]) -> str:
    """Names and reasons in one line."""
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
