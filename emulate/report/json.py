"""The verdict as one strict JSON object in a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import WrongUse

if TYPE_CHECKING:
    from emulate.verify.verdict import Verdict


def check_writable(path: Path) -> None:
    """Find out before the work starts whether the file can be written at its end.

    Args:
        path: The file of `--json`.

    Raises:
        WrongUse: When it cannot.
    """
    if path.is_dir():
        raise WrongUse(f"--json must name a file. Received: --json {str(path)!r}, which is a folder. Name a file in it.")
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
            f"--json must name a file that can be written. Received: --json {str(path)!r} ({error.strerror}). "
            "Name one in a folder that exists and is yours."
        ) from None


def write_json(verdict: Verdict, path: Path) -> None:
    """Write the verdict; a reader of the file sees all of it or nothing."""
    write_object(verdict.to_json(), path)


def write_object(content: Mapping[str, Any], path: Path) -> None:
    """Write one JSON object, as a verdict is written."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
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
