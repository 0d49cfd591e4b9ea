"""Read notebooks: their code cells as Python, without the lines that only IPython understands."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulate.errors import UsageError

SUFFIX = ".ipynb"
_MAGIC = re.compile(r"\s*([%!?]|[\w.]+\?)|.*\?\s*$")
_VALUE_OF_MAGIC = re.compile(r"\s*[\w.,\s]+=\s*[%!]")
_RUNS_ITS_BODY = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose cell is Python all the same."""


@dataclass(frozen=True)
class Cell:
    """Describe a code cell.

    Attributes:
        number: Its number among the code cells that are not empty, from 1: what Jupyter shows after "Run All".
        source: Its Python, with as many lines as the cell has.
        skipped: Each magic in it, with its line number.
    """

    number: int
    source: str
    skipped: tuple[tuple[int, str], ...] = ()

    def file_name(self, file: Path) -> str:
        """Return what tracebacks call the cell."""
        return f"{file}, cell {self.number}"


def is_notebook(file: Path) -> bool:
    """Return whether a file is a notebook, by its name."""
    return file.suffix == SUFFIX


def cells_of(file: Path, name: str, content: bytes | None = None) -> list[Cell]:
    """Read the code cells of a notebook.

    Args:
        file: The notebook.
        name: The program as it was written, for messages.
        content: What the notebook is to have instead of what it has.

    Returns:
        The cells, in order.

    Raises:
        UsageError: When it cannot be read, is no notebook, or a cell is not valid Python.
    """
    sources = [text for text in _sources(file, name, content) if text.strip()]
    return [_cell(number, text, file, name) for number, text in enumerate(sources, 1)]


def skipped(file: Path, cells: list[Cell]) -> str:
    """Return a sentence that names each magic that is not run; empty where there is none."""
    named = [f"cell {cell.number}, line {line}: {text}" for cell in cells for line, text in cell.skipped]
    return f"Skipped in {file.name}, because only IPython can run it: {'; '.join(named)}." if named else ""


def code_cells(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the code cells of a notebook's JSON, each with its text."""
    sheets = notebook.get("worksheets", [notebook])  # before version 4
    cells = [cell for sheet in sheets for cell in sheet["cells"] if cell["cell_type"] == "code"]
    sources = [cell["source"] if "source" in cell else cell["input"] for cell in cells]
    return [(cell, source if isinstance(source, str) else "".join(source)) for cell, source in zip(cells, sources, strict=True)]


def _sources(file: Path, name: str, content: bytes | None) -> list[str]:
    try:
        notebook = json.loads(file.read_bytes() if content is None else content)
        texts = [text for _, text in code_cells(notebook)]
    except OSError as error:
        raise UsageError(f"A program's file must be readable. Received: program={name!r} ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"A notebook must be JSON with cells, as Jupyter writes it. Received: program={name!r} ({why})."
        ) from None
    language = notebook.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise UsageError(f"A notebook's cells must be Python. Received: program={name!r}, whose language is {language!r}.")
    return texts


def _cell(number: int, text: str, file: Path, name: str) -> Cell:
    """Return the cell in which `pass` stands in the place of each line that is no Python but a magic."""
    lines, magics = text.split("\n"), dict[int, str]()
    first = next(at for at, line in enumerate(lines) if line.strip())
    if lines[first].startswith("%%"):
        magics[first] = lines[first].strip()
        whole = not lines[first].startswith(_RUNS_ITS_BODY)
        lines = [""] * len(lines) if whole else [*lines[:first], "", *lines[first + 1 :]]
    while (error := _error_in("\n".join(lines), Cell(number, "").file_name(file))) is not None:
        at = (error.lineno or 1) - 1
        if not 0 <= at < len(lines) or not _MAGIC.match(lines[at]):
            raise _not_python(number, error, lines[at] if 0 <= at < len(lines) else "", name)
        last = at
        while lines[last].endswith("\\") and last + 1 < len(lines):
            last += 1
        magics[at] = lines[at].strip()
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : last + 1] = [f"{indent}pass", *[""] * (last - at)]
    return Cell(number, "\n".join(lines), tuple((at + 1, magic) for at, magic in sorted(magics.items())))


def _error_in(source: str, file_name: str) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, file_name, "exec")
    except SyntaxError as error:
        return error
    return None


def _not_python(number: int, error: SyntaxError, line: str, name: str) -> UsageError:
    where = f"cell {number}, line {error.lineno}" + (f": {line.strip()}" if line.strip() else "")
    if _VALUE_OF_MAGIC.match(line):
        return UsageError(
            f"A magic whose value is used cannot be skipped. Received: program={name!r} ({where}). "
            "Write that line in Python (subprocess.run, say)."
        )
    return UsageError(f"A notebook's cells must be valid Python. Received: program={name!r} with {error.msg} ({where}).")


def trees(file: Path, name: str) -> list[tuple[str, ast.Module]]:
    """Parse each cell.

    Args:
        file: The notebook.
        name: The program as it was written, for messages.

    Returns:
        What messages call the cell, and its syntax tree.
    """
    return [(cell.file_name(Path(file.name)), ast.parse(cell.source)) for cell in cells_of(file, name)]
