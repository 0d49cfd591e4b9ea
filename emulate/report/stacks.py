"""Shorten the stack of a hanging host: the program's frames, with libraries in one line."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from emulate.program import trim_traceback

_FRAME = re.compile(r'(?P<indent>\s*)File "(?P<file>[^"]+)", line \d+')
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_OUTSIDE = "(outside the program: it has ended, or has not begun)"


@dataclass
class _StackPart:
    """Hold a frame with the text below it, or a line that is no frame."""

    lines: list[str]
    library: str | None = None
    is_frame: bool = False
    indent: int = field(default=0)


def short_stack(text: str) -> str:
    """Return a stack from faulthandler or traceback without frames of gpudist, with library frames only counted."""
    parts = list(_parts(trim_traceback(text)))
    if not any(part.is_frame for part in parts):
        return _OUTSIDE if _FRAME.search(text) else text
    lines: list[str] = []
    for is_library, group in groupby(_without_empty_threads(parts), key=lambda part: part.library is not None):
        run = list(group)
        lines += [_counted(run)] if is_library else [line for part in run for line in part.lines]
    return "\n".join(lines)


def _parts(text: str) -> Iterator[_StackPart]:
    current: _StackPart | None = None
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            if current:
                yield current
            current = _StackPart([line], _library(match["file"]), True, len(match["indent"]))
        elif current and current.is_frame and line.strip() and len(line) - len(line.lstrip()) > current.indent:
            current.lines.append(line)
        elif line.strip():
            if current:
                yield current
            current = _StackPart([line])
    if current:
        yield current


def _without_empty_threads(parts: list[_StackPart]) -> Iterator[_StackPart]:
    for at, part in enumerate(parts):
        if part.is_frame or (at + 1 < len(parts) and parts[at + 1].is_frame):
            yield part


def _library(file: str) -> str | None:
    """Return the name of the installed package of a file; None for the user's own."""
    for folder in sorted(_LIBRARIES, key=len, reverse=True):
        if file.startswith(folder):
            return file[len(folder) :].split("/")[0].removesuffix(".py")
    return "python" if file.startswith("<frozen") else None


def _counted(run: list[_StackPart]) -> str:
    names = ", ".join(dict.fromkeys(part.library or "" for part in run))
    return " " * run[0].indent + f"... {len(run)} frame{'s' if len(run) > 1 else ''} of {names}"
