"""Write report files: complete or not at all, and checked to be writable before the work starts. JSON is strict."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from emulate.verify.verdict import Verdict

STANDARD_OUTPUT = Path("/dev/stdout")
_OUR_JSON = rb'\s*\{\s*"schema"\s*:\s*"gpudist\.'
_OUR_PAGE = rb'<!DOCTYPE html>.{,400}<meta name="generator" content="gpudist">'
_OUR_SARIF = rb'\s*\{\s*"\$schema".{,300}"driver"\s*:\s*\{\s*"name"\s*:\s*"gpudist"'
_OUR_CERTIFICATE = rb'PK.{28}about\.npy.{,200}\{"format": "gpudist\.certificate/'
_OURS = re.compile(b"|".join((_OUR_JSON, _OUR_PAGE, _OUR_SARIF, _OUR_CERTIFICATE)), re.DOTALL)
_HEAD = 1024  # bytes of a file that tell whose it is


def check_writable(path: Path, option: str) -> None:
    """Find out before the work starts whether the file can be written at its end, and that nothing is lost by it.

    Args:
        path: The file.
        option: The option that names it, for the message.

    Raises:
        UsageError: When it cannot, or when it has something else than an earlier report.
    """
    if path.is_dir():
        raise UsageError(f"{option} must name a file. Received: {option} {str(path)!r}, which is a folder. Name a file in it.")
    if _is_special(path):
        return
    try:
        descriptor, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        os.unlink(probe)
        is_lost = path.exists() and not _is_report(path)
    except OSError as error:
        raise UsageError(
            f"{option} must name a file that can be written. Received: {option} {str(path)!r} ({error.strerror}). "
            "Name one in a folder that exists and is yours."
        ) from None
    if is_lost:
        raise UsageError(
            f"{option} must name a new file or an earlier report. Received: {option} {str(path)!r}, which has something else. "
            "Name another, or delete it first."
        )


def _is_report(path: Path) -> bool:
    """Return whether a file is empty or a report of gpudist; it is also opened for writing."""
    with path.open("r+b") as file:
        head = file.read(_HEAD)
    return not head or _OURS.match(head) is not None


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
    if path == STANDARD_OUTPUT:
        # If standard output is a file, opening it again would overwrite its content.
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
        return
    if _is_special(path):
        with path.open("a", encoding="utf-8") as file:  # behind /dev/fd/3 there may be a file that others write too
            file.write(text)
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
    """Return whether it is a device, a pipe or an open stream (`/dev/stdout`): such a file is written, not replaced."""
    is_stream = path.is_symlink() and (path.is_relative_to("/dev") or path.is_relative_to("/proc"))
    return is_stream or (path.exists() and not path.is_file())


def _mode_of(path: Path) -> int:
    """Return the permissions that the file has, or would get from a plain open."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_json(verdict: Verdict, path: Path) -> None:
    """Write the verdict; a reader of the file sees all of it or nothing."""
    write_object(verdict.to_json(), path)


def write_object(content: Mapping[str, Any], path: Path) -> None:
    """Write one JSON object, as a verdict is written."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
