"""Manage the folder of a run's checkpoints: names, complete checkpoints and leftovers."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

_WHOLE = re.compile(r"step-(\d{8,})")
_BEGUN, _REPLACED, _ASIDE = ".writing-", ".replaced-", ".set-aside"
_OWN = re.compile(rf"({re.escape(_BEGUN)}|{re.escape(_REPLACED)})(\d{{8,}})")


class Folder:
    """Manage a folder with one sub-folder for each checkpoint.

    Args:
        path: The path. It is created with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Return the steps of its checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        matches = (_WHOLE.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.path / f"step-{step:08}"

    def begun(self, step: int) -> Path:
        """Return the path of the checkpoint of a step while it is written."""
        return self.path / f"{_BEGUN}{step:08}"

    def begin(self, step: int) -> Path:
        """Make an empty folder for a new checkpoint. Leftovers of a failed one are removed first."""
        self.clean()
        path = self.begun(step)
        path.mkdir(parents=True)
        return path

    def commit(self, step: int) -> Path:
        """Rename a written checkpoint to its final name. A checkpoint of the same step is replaced."""
        final, replaced = self.of(step), self.path / f"{_REPLACED}{step:08}"
        sync(self.begun(step))
        if final.exists() or final.is_symlink():
            final.rename(replaced)
        self.begun(step).rename(final)
        sync(self.path)
        _remove(replaced)
        return final

    def abandon(self, step: int) -> None:
        """Remove the files of a checkpoint that was not finished."""
        _remove(self.begun(step))

    def clean(self) -> None:
        """Remove what a killed run left unfinished, and restore what it was about to replace."""
        if not self.path.is_dir():
            return
        for entry in list(self.path.iterdir()):
            own = _OWN.fullmatch(entry.name)
            if own and own[1] == _REPLACED:
                final = self.of(int(own[2]))
                if final.exists():
                    _remove(entry)
                else:
                    entry.rename(final)
            elif own:
                _remove(entry)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoint of a step that the run does not continue from: no later start must take it for the newest."""
        target = self.path / f"{self.of(step).name}{_ASIDE}"
        if target.exists():
            target = target.with_name(f"{target.name}-{time.time_ns()}")
        self.of(step).rename(target)

    def prune(self, keep: int) -> None:
        """Remove all but the newest."""
        for step in self.steps()[keep:]:
            # Renamed first: a checkpoint that is half removed must not be found.
            doomed = self.begun(step)
            _remove(doomed)
            self.of(step).rename(doomed)
            _remove(doomed)


def _remove(folder: Path) -> None:
    """Remove a folder; of a symbolic link, only the link."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
