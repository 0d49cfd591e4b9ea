"""features.json, and the table of the documentation made of it; a test holds the two together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.features.feature import FEATURES
from benchmarks.features.judge import COLUMNS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "features.json"
PAGE = HERE.parents[1] / "docs" / "features.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->\n"


def read() -> dict[str, Any]:
    """What was measured."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def is_right(cell: dict[str, Any]) -> bool:
    """Whether it trains the model of one device."""
    return bool(cell["verdict"] == "equivalent")


def markdown(results: dict[str, Any]) -> str:
    """A row for each feature; in each cell ours, then what plain Keras gives."""
    lines = ["| feature | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for name, feature in FEATURES.items():
        if name in results:
            row = results[name]
            cells = [f"{_ours(row.get('ours', {}).get(c))} {_theirs(row.get('keras', {}).get(c))}".strip() for c in COLUMNS]
            lines.append(f"| {feature.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ours(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return "✔" if is_right(cell) else f"**{cell['verdict']}**"


def _theirs(cell: dict[str, Any] | None) -> str:
    if cell is None or cell["verdict"] == "none":
        return ""
    if is_right(cell):
        return "/ ✔"
    if cell["verdict"] in ("divergent", "by-design"):
        return f"/ ✘ {cell['error']:g}" if cell["error"] is not None else f"/ ✘ {cell['cause']}"
    return f"/ ✘ {cell['raised'] or cell['verdict']}"


def in_page(text: str, results: dict[str, Any]) -> str:
    """The page's text with this table."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + markdown(results) + END + tail


def write(results: dict[str, Any]) -> None:
    """Put the results into features.json, a row a line."""
    kept = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in FEATURES if name in results]
    RESULTS.write_text("{\n" + ",\n".join(kept) + "\n}\n")


def show(results: dict[str, Any]) -> None:
    """Put the table into the page."""
    PAGE.write_text(in_page(PAGE.read_text(), results))
