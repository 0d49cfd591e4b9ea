"""Write edits down: as a unified diff, and into the files, complete or not at all.

The code cells of a notebook are edited as one Python text, in which a mark begins each cell, and magics are comments.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from emulate.errors import UsageError
from emulate.files import replace_file
from emulate.program import cells_of, code_cells

_NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True)
class Edited:
    """Hold a file's content before and after edits."""

    before: bytes
    after: bytes


def unified_diff(file: Path, before: bytes, after: bytes) -> str:
    """Return the diff of a file, which `git apply` and `patch -p1` read in the working directory."""
    here = Path.cwd()
    name = (file.relative_to(here) if file.is_relative_to(here) else file).as_posix().lstrip("/")
    old, new = (text.decode("utf-8", "surrogateescape").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines)


def check_editable(file: Path) -> None:
    """Find out before the work starts whether a file can be replaced.

    Args:
        file: The file, or a link to it.

    Raises:
        UsageError: When it cannot.
    """
    real = Path(os.path.realpath(file))
    if not (os.access(real, os.W_OK) and os.access(real.parent, os.W_OK)):
        raise UsageError(
            f"--write needs a program that can be written, in a folder that can. Received: file={str(file)!r}. "
            "Change its permissions, or use --patch FILE."
        )


def write_edits(files: Mapping[Path, Edited]) -> list[Path]:
    """Put edits in place; each file is replaced at once, and a copy of it stays beside it.

    Args:
        files: What to write. A link stays one: the file behind it is replaced.

    Returns:
        The copies, `train.py.orig` say, in the order of the files.

    Raises:
        UsageError: When a file is not any more what it was when the edits were made. Then none is written.
    """
    for file, edited in files.items():
        check_editable(file)
        if file.read_bytes() != edited.before:
            raise UsageError(
                f"A file must not change while gpudist verifies it. Received: file={str(file)!r}, which did. "
                "Nothing was written: run gpudist fix again."
            )
    return [_replace(Path(os.path.realpath(file)), edited.after) for file, edited in files.items()]


def _replace(file: Path, content: bytes) -> Path:
    backups = (file.with_name(f"{file.name}.orig{number or ''}") for number in count())
    backup = next(path for path in backups if not path.exists())
    shutil.copy2(file, backup)
    replace_file(file, content)
    return backup


_MARK = "# gpudist: cell {}"
_MAGIC = "  # gpudist: line of the notebook: "


def as_python(file: Path, content: bytes) -> bytes:
    """Return the code cells of a notebook as one text."""
    texts = [text for _, text in code_cells(json.loads(content)) if text.strip()]
    parts = []
    for cell, text in zip(cells_of(file, file.name, content), texts, strict=True):
        lines = zip(cell.source.split("\n"), text.split("\n"), strict=True)
        parts += [_MARK.format(cell.number), *(line if line == own else f"{line}{_MAGIC}{own}" for line, own in lines)]
    return "\n".join(parts).encode()


def line_in_python(python: bytes, cell: int, line: int) -> int:
    """Return which line of that text a line of a cell is."""
    return python.decode().split("\n").index(_MARK.format(cell)) + 1 + line


def as_notebook(content: bytes, python: bytes) -> bytes:
    """Return a notebook with cells of such a text, written as it was."""
    notebook = json.loads(content)
    _, *texts = re.split(rf"^{_MARK.format('[0-9]+')}\n", python.decode(), flags=re.MULTILINE)
    cells = [cell for cell, text in code_cells(notebook) if text.strip()]
    for number, (cell, text) in enumerate(zip(cells, texts, strict=True), 1):
        source = re.sub(rf"^.*{_MAGIC}", "", text if number == len(cells) else text[:-1], flags=re.MULTILINE)
        key = "source" if "source" in cell else "input"
        cell[key] = source if isinstance(cell[key], str) else source.splitlines(keepends=True)
    indent = re.match(rb"\{\n( +)", content)
    written = json.dumps(notebook, indent=len(indent[1]) if indent else None, ensure_ascii=content.isascii())
    return (written + "\n" * content.endswith(b"\n")).encode()
