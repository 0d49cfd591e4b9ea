"""The traceback of a program as the user knows it: without the frames of gpudist and of the import machinery."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1])
_FRAME = re.compile(r'(?P<indent>\s*)File "(?P<file>[^"]+)", line \d+')
_MACHINERY = ("<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_HEADER = "Traceback (most recent call last):"


def own_traceback(error: BaseException) -> str:
    """The text of an exception as Python prints it, frames of gpudist removed; it ends without a newline."""
    return trim_traceback("".join(traceback.format_exception(error)))


def trim_traceback(text: str) -> str:
    """Remove the frames of gpudist from the text of a traceback, also where a message quotes one (AutoGraph does)."""
    kept = list(_without_our_frames(text.rstrip("\n").split("\n")))
    kept = [line for at, line in enumerate(kept) if not _is_header_without_frames(kept, at)]
    return "\n".join(line for at, line in enumerate(kept) if line.strip() or (at and kept[at - 1].strip()))


def _without_our_frames(lines: Iterable[str]) -> Iterator[str]:
    indent: int | None = None
    for line in lines:
        if indent is not None and len(line) - len(line.lstrip()) > indent:
            continue
        match = _FRAME.match(line)
        indent = len(match["indent"]) if match and is_ours(match["file"]) else None
        if indent is None:
            yield line


def is_ours(file: str) -> bool:
    """Whether a file of a traceback is gpudist's, or of the import machinery."""
    return file in _MACHINERY or file.startswith(_OURS + "/")


def _is_header_without_frames(lines: list[str], at: int) -> bool:
    return lines[at].strip() == _HEADER and not (at + 1 < len(lines) and _FRAME.match(lines[at + 1]))
