"""Manage the scratch folder of a supervisor, and remove those of supervisors that were killed before they could clean up."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from emulate.cluster.views import remove_tree

_PREFIX = "gpudist-"
_HELD = "held"  # locked as long as the supervisor is there; the kernel unlocks it, however that one ends


def make_scratch() -> tuple[Path, int | None]:
    """Make a scratch folder, and remove those that nobody holds any more.

    Returns:
        The folder, and the descriptor that holds it until it is closed; None where the file system has no locks, and nobody
        can tell whether it is held.

    Raises:
        OSError: When there is no place for it.
    """
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    made = folder / "made"
    try:
        held = _lock(made, os.O_CREAT)
    except OSError:
        return folder, None
    made.rename(folder / _HELD)  # what has this name is locked, or abandoned
    return folder, held


def _remove_abandoned() -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [Path(entry) for entry in entries if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        with contextlib.suppress(OSError):  # another user's, one that is being made, or one that is held
            os.close(_lock(folder / _HELD))
            remove_tree(folder)


def _lock(path: Path, flags: int = 0) -> int:
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
