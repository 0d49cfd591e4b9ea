"""Show the traceback of a program without the frames of gpudist and of the import machinery, and hint at what it lacks.

Hints are added to errors that do not say how to start the program, or what to install. For them the folders of a program are
found: the working directory, which may be gone, and the folder of its package.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from emulate.errors import UsageError

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
    headers = [at for at, line in enumerate(kept) if line.strip() == _HEADER]
    without_frames = {at for at in headers if not (at + 1 < len(kept) and _FRAME.match(kept[at + 1]))}
    kept = [line for at, line in enumerate(kept) if at not in without_frames]
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
    """Return whether a file of a traceback belongs to gpudist or to the import machinery. Installed examples are programs."""
    return file in _MACHINERY or (file.startswith(f"{_OURS}/") and not file.startswith(f"{_OURS}/examples/"))


def is_core(file: str) -> bool:
    """Return whether a file is gpudist_core's, wherever that lies: in a working copy or another checkout, say."""
    return (package_of(Path(file))[1] or "").startswith("gpudist_core.")


def working_directory() -> Path:
    """Return the working directory of this process and of the hosts.

    Returns:
        The folder.

    Raises:
        UsageError: When it was deleted, or cannot be seen.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(
            f"The working directory must be there. Received: one that was deleted or cannot be seen ({error.strerror}). "
            "Change to a folder that exists."
        ) from None


def package_of(file: Path) -> tuple[Path, str | None]:
    """Return where a file is imported from: in a package by its dotted name (relative imports work), else by itself."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").exists() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts) if len(parts) > 1 else None


_FILE = re.compile(r'^\s*File "([^"]+)", line \d+', re.MULTILINE)
_RELATIVE = "attempted relative import with no known parent package"
_NO_KERAS_2 = ("No module named 'tf_keras'", "ImportError: Keras cannot be imported")


def hint_for(failure: str | None) -> str:
    """Return what to do about a failure of the program.

    Args:
        failure: Its traceback; None where there is none.

    Returns:
        A sentence; empty where the error itself says enough.
    """
    error = (failure or "").rstrip().rpartition("\n")[2]
    if failure and _RELATIVE in error:
        return _as_module(_FILE.findall(failure))
    files = _FILE.findall(failure or "")
    if files and error.startswith("AssertionError") and is_core(files[-1]):  # it asserts nothing of what a program gives it
        return "This is a fault of gpudist_core, not of the program. Please report it with this traceback."
    if any(text in error for text in _NO_KERAS_2):
        return 'TF_USE_LEGACY_KERAS=1 and tf_keras need Keras 2: pip install "gpudist[keras2]"'
    return ""


def _as_module(files: list[str]) -> str:
    """Return how to start the program's own file as a module; empty for a file that another one imported."""
    if len(files) != 1:
        return ""
    file, here = Path(files[0]), Path.cwd()
    root, module = package_of(file)
    if module is None:  # a package need not have an __init__.py
        root = here if here in file.parent.parents else file.parent.parent
        module = ".".join(file.relative_to(root).with_suffix("").parts)
    where = "" if root == here else f", in the folder {root}"
    return f"A file that imports from its own package is started as a module of it: -m {module}{where}"
