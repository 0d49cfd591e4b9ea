"""Edit notebooks: their code cells are one Python text, in which a mark begins each cell, and magics are comments."""

from __future__ import annotations

import json
import re
from pathlib import Path

from emulate.program import cells_of, code_cells

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
