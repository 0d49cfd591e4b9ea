"""Show the traceback of a program without the frames of gpudist and of the import machinery."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from emulate.program.folder import package_of

_OURS = str(Path(__file__).resolve().parents[1])
_FRAME = re.compile(r'(?P<indent>\s*)File "(?P<file>[^"]+)", line \d+')
_MACHINERY = ("<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_HEADER = "Traceback (most recent call last):"
_NUMBERS = re.compile(r"\[(?:[][\s,.\d+\-eEj]|nan|inf|True|False)+\]")
"""Regular expression for an array as NumPy, TensorFlow and Python print it."""
_SHORTEST_ARRAY = 80
_MOST_IN_A_LINE, _MOST_LINES, _MOST_FRAMES = 600, 24, 40
_SHARE_OF_FIRST = 0.6
"""Fraction of the kept text that comes from the beginning."""


def own_traceback(error: BaseException) -> str:
    """Return the text of an exception as Python prints it, without frames of gpudist and without a final newline."""
    return trim_traceback("".join(traceback.format_exception(error)))


def trim_traceback(text: str) -> str:
    """Remove the frames of gpudist from the text of a traceback, also where a message quotes one (AutoGraph does)."""
    kept = list(_without_our_frames(text.rstrip("\n").split("\n")))
    kept = [line for at, line in enumerate(kept) if not _is_header_without_frames(kept, at)]
    return "\n".join(line for at, line in enumerate(kept) if line.strip() or (at and kept[at - 1].strip()))


def shorten_traceback(text: str) -> str:
    """Return a traceback for people: arrays, long lines, long messages and deep recursions lose their middle.

    `--json` holds the whole text.
    """
    lines = _NUMBERS.sub(_first_numbers, text).split("\n")
    kept: list[str] = []
    for is_frame, blocks in groupby(_blocks(lines), key=lambda block: bool(_FRAME.match(block[0]))):
        kept += _without_middle(list(blocks), _MOST_FRAMES if is_frame else _MOST_LINES, "frames" if is_frame else "lines")
    return "\n".join(map(_shorten_line, kept))


def _first_numbers(match: re.Match[str]) -> str:
    array = match[0]
    if len(array) < _SHORTEST_ARRAY:
        return array
    depth = len(array) - len(array.lstrip("["))
    return "[" * depth + "".join(re.findall(r"[^][\s]+\s*", array)[:3]).rstrip(", \n") + ", ..." + "]" * depth


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield each frame with the lines that belong to it, and each other line alone."""
    block: list[str] = []
    for line in lines:
        frame = _FRAME.match(block[0]) if block else None
        if frame and len(line) - len(line.lstrip()) > len(frame["indent"]) and not _FRAME.match(line):
            block.append(line)
            continue
        if block:
            yield block
        block = [line]
    yield block


def _without_middle(blocks: list[list[str]], most: int, what: str) -> Iterator[str]:
    first = int(most * _SHARE_OF_FIRST)
    middle = blocks[first : len(blocks) - (most - first)] if len(blocks) > most else []
    for block in blocks[:first]:
        yield from block
    if middle:
        yield f"{re.match(r' *', middle[0][0])[0]}... {len(middle)} more {what} ..."  # type: ignore[index]
    for block in blocks[first + len(middle) :]:
        yield from block


def _shorten_line(line: str) -> str:
    first = int(_MOST_IN_A_LINE * _SHARE_OF_FIRST)
    return line if len(line) <= _MOST_IN_A_LINE else f"{line[:first]} ... {line[first - _MOST_IN_A_LINE :]}"


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
    """Return whether a file of a traceback belongs to gpudist or to the import machinery."""
    return file in _MACHINERY or file.startswith(_OURS + "/")


def is_core(file: str) -> bool:
    """Return whether a file is gpudist_core's, wherever that lies: in a working copy or another checkout, say."""
    return (package_of(Path(file))[1] or "").startswith("gpudist_core.")


def _is_header_without_frames(lines: list[str], at: int) -> bool:
    return lines[at].strip() == _HEADER and not (at + 1 < len(lines) and _FRAME.match(lines[at + 1]))
