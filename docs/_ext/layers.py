"""Write `docs/explanation/layers.md`: the layers of the code, from the contract that `make check` tests, with their sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 92


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the drawing before Sphinx looks for its sources."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "explanation" / "layers.md"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(path: Path) -> None:
    """Write the drawing; one that is the same stays as it is, so that Sphinx does not read it again."""
    text = "```text\n" + "\n".join(drawing()) + "\n```\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def drawing() -> Iterator[str]:
    """Yield the lines of the drawing: the highest layer first, each with its parts and their numbers of files and lines."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    for layer in layers:
        parts = [part.strip(" ()") for part in layer.split(":")]
        text, rows = "", []
        for part in map(_described, parts):
            if text and len(text) + len(part) + 3 > _WIDTH - 4:
                rows.append(text)
                text = ""
            text += ("   " if text else "") + part
        yield "+" + "-" * (_WIDTH - 2) + "+"
        yield from (f"| {row:<{_WIDTH - 4}} |" for row in [*rows, text])
    yield "+" + "-" * (_WIDTH - 2) + "+"


def _described(part: str) -> str:
    folder = _ROOT / "emulate" / part
    single = folder.with_suffix(".py")
    files = [single] if single.is_file() else [*folder.rglob("*.py")]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return f"{part}.py ({lines:,})" if single.is_file() else f"{part} ({len(files)} files, {lines:,} lines)"
