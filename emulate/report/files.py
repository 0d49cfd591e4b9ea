"""Files that a report is written to: whole or not there, and known to be writable before the work starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from emulate.errors import Unavailable, WrongUse


def check_writable(path: Path, option: str) -> None:
    """Find out before the work starts whether the file can be written at its end.

    Args:
        path: The file.
        option: The option that names it, for the message.

    Raises:
        WrongUse: When it cannot.
    """
    if path.is_dir():
        raise WrongUse(f"{option} must name a file. Received: {option} {str(path)!r}, which is a folder. Name a file in it.")
    if _is_special(path):
        return
    try:
        descriptor, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        os.unlink(probe)
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise WrongUse(
            f"{option} must name a file that can be written. Received: {option} {str(path)!r} ({error.strerror}). "
            "Name one in a folder that exists and is yours."
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file; a reader of it sees all of it or nothing.

    Args:
        path: The file.
        text: All that it is to have.

    Raises:
        BrokenPipeError: When it is a pipe that nobody reads any more.
        Unavailable: When it cannot be written: the disk is full, its folder is gone.
    """
    try:
        _write_whole(path, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(
            f"A report must find room in its file. Received: file={str(path)!r} ({error.strerror or error}). "
            "Make room there, or name another."
        ) from None


def _write_whole(path: Path, text: str) -> None:
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, _mode_of(path))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe (`/dev/stdout`): such a file is written, not replaced."""
    return path.exists() and not path.is_file()


def _mode_of(path: Path) -> int:
    """The permissions the file has, or would have had if it had been opened plainly."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
