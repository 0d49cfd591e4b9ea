"""Manage the folder of a run's checkpoints: names, complete checkpoints and leftovers, and the lock of the run that writes.

A lock file names the process and its host, and is touched while the run lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from gpudist_core.errors import FolderInUse

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

    def commit(self, step: int) -> None:
        """Rename a written checkpoint to its final name. A checkpoint of the same step is replaced."""
        final, replaced = self.of(step), self.path / f"{_REPLACED}{step:08}"
        sync(self.begun(step))
        if final.exists() or final.is_symlink():
            final.rename(replaced)
        self.begun(step).rename(final)
        sync(self.path)
        _remove(replaced)

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


_LOCK = ".lock"
IN_USE = "Only one run may write its checkpoints into a folder"


class Lock:
    """Lock a folder.

    A lock of a dead process on this host is taken over at once. A lock from another host is taken over after `patience` seconds
    without a sign of life.

    Args:
        folder: The folder; it must exist.
        beat: Seconds between two signs of life.
        patience: Seconds without a sign of life after which a run on another host counts as dead.
    """

    def __init__(self, folder: Path, beat: float = 5.0, patience: float = 30.0) -> None:
        self._path, self._beat, self._patience = folder / _LOCK, beat, patience
        self._folder = folder
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            FolderInUse: If another live run has it.
        """
        text = json.dumps(_myself())
        while not self._create(text):
            other = self._read()
            if other is not None and other != _myself() and self._lives(other):
                raise FolderInUse(
                    f"{IN_USE}. Received: folder={str(self._folder)!r}, in use by "
                    f"process {other.get('pid')} on {other.get('host')}. End that run, or give this one a folder of its own."
                )
            self._remove(other)
        self._thread = threading.Thread(target=self._keep_fresh, name="checkpoint lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lock."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            if self._read() == _myself():
                self._path.unlink(missing_ok=True)

    def _create(self, text: str) -> bool:
        # Written beside and linked, so that nobody reads half a lock.
        own = self._path.with_name(f"{_LOCK}-{socket.gethostname()}-{os.getpid()}")
        own.write_text(text, encoding="utf-8")
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _read(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _remove(self, judged: dict[str, Any] | None) -> None:
        """Remove a dead run's lock. The run that renames it first wins, and restores a lock that was taken meanwhile."""
        gone = self._path.with_name(f"{_LOCK}-gone-{socket.gethostname()}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(gone)
            try:
                if judged is not None and json.loads(gone.read_text(encoding="utf-8")) != judged:
                    with contextlib.suppress(FileExistsError):
                        os.link(gone, self._path)
            finally:
                gone.unlink()

    def _lives(self, other: dict[str, Any]) -> bool:
        me = _myself()
        if other.get("host") == me["host"] and other.get("boot") == me["boot"] and other.get("namespace") == me["namespace"]:
            started = _started(int(other.get("pid", 0)))
            return bool(started) and started == other.get("started")
        # A run on another host touches its lock meanwhile, if it lives. Clocks of two hosts are never compared.
        before, until = self._touched(), time.monotonic() + self._patience
        while time.monotonic() < until:
            if self._touched() != before:
                return True
            time.sleep(min(0.2, self._beat))
        return False

    def _touched(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _keep_fresh(self) -> None:
        while not self._stop.wait(self._beat):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _myself() -> dict[str, Any]:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": namespace,
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str:
    """Return the start time of a process in kernel ticks; empty if it does not exist."""
    after_name = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 and after_name[0] != "Z" else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
