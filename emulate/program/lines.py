"""Tell the user's lines from those of libraries, and read them."""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from emulate.program.copies import original
from emulate.program.tracebacks import is_core, is_ours

_CELL = re.compile(r"^(?P<file>.+\.ipynb), cell (?P<cell>\d+)$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_PACKAGES = ("site-packages", "dist-packages")
_GENERATED = "__autograph_generated_file"


def users(frames: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the frames of the user's own files, in their order."""
    return [frame for frame in frames if is_users(frame[0])]


def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither a library's, Python's nor ours. What lies beside the program is, too."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return _is_users(file, original(main) if isinstance(main, str) else "")


@lru_cache(maxsize=4096)
def _is_users(file: str, main: str) -> bool:
    if file.startswith("<") or _GENERATED in file:
        return False
    is_beside = bool(main) and not is_ours(main) and os.path.dirname(file) == os.path.dirname(main)
    return is_beside or not _is_library(file)


def _is_library(file: str) -> bool:
    return is_ours(file) or is_core(file) or any(part in _PACKAGES for part in Path(file).parts) or _is_pythons(file)


def _is_pythons(file: str) -> bool:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file.startswith(tuple(f"{path}{os.sep}" for path in (*paths, site.getusersitepackages())))


def innermost(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost frame under the program's folder, else the innermost of all."""
    roots = tuple(f"{original(os.path.abspath(path))}{os.sep}" for path in {sys.path[0] if sys.path else "", os.getcwd()})
    own = [frame for frame in frames if frame[0].startswith(roots)]
    candidates = own or frames
    return candidates[-1] if candidates else None


def described(file: str, line: int) -> dict[str, Any]:
    """Return a line as traces and reports have it: file, line, text, and in a notebook the cell."""
    match = _CELL.match(file)
    place: dict[str, Any] = {"file": match["file"] if match else file, "line": line}
    place["text"] = linecache.getline(file, line).strip()
    return place | ({"cell": int(match["cell"])} if match else {})


def lines_of_traceback(text: str) -> Iterator[dict[str, Any]]:
    """Yield the user's lines of a traceback or stack as Python prints it, outermost first."""
    for match in _FRAME.finditer(text):
        if is_users(match["file"]):
            yield described(match["file"], int(match["line"]))
