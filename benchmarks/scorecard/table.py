"""The scorecard's figures, its table in the docs, and what has become worse than the stored figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scorecard.cells import ROOT, Result

STORED = Path(__file__).resolve().parent / "stored.json"
"""The figures of the last whole run, which a later one must not fall behind."""
PAGE = ROOT / "docs" / "scorecard_table.md"
_COLUMNS = (
    "cells",
    "detected",
    "named first",
    "all named",
    "line right",
    "false alarms",
    "unexplained",
    "fixed",
    "starts",
    "cost",
)


def figures(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the figures of each group: right and wrong programs of the corpus, of the manifest, and generated ones."""
    groups = dict.fromkeys((result.group, result.is_right) for result in results)
    named = {
        f"{group}, {'right' if is_right else 'wrong'}": [
            one for one in results if (one.group, one.is_right) == (group, is_right)
        ]
        for group, is_right in groups
    }
    return {name: _of(some) for name, some in {**named, "all": list(results)}.items()}


def _of(results: Sequence[Result]) -> dict[str, Any]:
    wrong = [one for one in results if not one.is_right]
    pointing = [one for one in wrong if one.line_right is not None]
    costs = [one.seconds / one.plain for one in results if one.plain]
    starts = [one.starts for one in results if one.starts is not None]
    tries = [one.tries for one in wrong if one.fixed and one.tries is not None]
    return {
        "cells": len(results),
        "wrong": len(wrong),
        "detected": _count(wrong, lambda one: one.detected),
        "named_first": _count(wrong, lambda one: one.detected and one.named_first),
        "named": _count(wrong, lambda one: one.detected and one.named),
        "with_line": len(pointing),
        "line_right": _count(pointing, lambda one: bool(one.line_right)),
        "right": len(results) - len(wrong),
        "false_alarms": _count(results, lambda one: one.false_alarm),
        "undeserved": _count(wrong, lambda one: bool(one.undeserved)),
        "unexplained": _count(results, lambda one: one.mute),
        "asked_to_fix": _count(wrong, lambda one: one.fixed is not None),
        "fixed": _count(wrong, lambda one: bool(one.fixed)),
        "tries_median": median(tries) if tries else None,
        "starts_median": median(starts) if starts else None,
        "starts_most": max(starts, default=None),
        "cost_median": round(median(costs), 1) if costs else None,
    }


def _count(results: Sequence[Result], holds: Callable[[Result], bool]) -> int:
    return sum(holds(one) for one in results)


def misses(results: Sequence[Result]) -> list[Result]:
    """Return the cells that are judged wrongly, the line apart."""
    return [one for one in results if not one.is_well_judged]


def markdown(results: Sequence[Result], missing: int = 0) -> str:
    """Return the table, and the list of what is judged wrongly, as a part of a page of the docs.

    Args:
        results: What was judged.
        missing: How many cells of the scorecard were not.

    Returns:
        Markdown.
    """
    rows = [_row(name, of) for name, of in figures(results).items()]
    found = misses(results)
    lines = [
        f"| programs | {' | '.join(_COLUMNS)} |",
        "|" + " --- |" * 11,
        *rows,
        "",
        f"Judged wrongly ({len(found)} of {len(results)} cells):",
        "",
    ]
    lines += ["| program | verdict | causes | what is wrong |", "| --- | --- | --- | --- |", *map(_miss, found)]
    lines += ["", f"{missing} cells of the scorecard have not been judged yet."] if missing else []
    return "\n".join(lines) + "\n"


def _row(name: str, of: dict[str, Any]) -> str:
    def share(count: str, whole: str) -> str:
        return f"{of[count]} of {of[whole]}" if of[whole] else "-"

    starts = "-" if of["starts_median"] is None else f"{of['starts_median']:g}, at most {of['starts_most']}"
    cells = [share(count, "wrong") for count in ("detected", "named_first", "named")]
    cells += [
        share("line_right", "with_line"),
        share("false_alarms", "right"),
        str(of["unexplained"]),
        share("fixed", "asked_to_fix") + ("" if of["tries_median"] is None else f" ({of['tries_median']:g})"),
        starts,
        "-" if of["cost_median"] is None else f"{of['cost_median']:g}x",
    ]
    return f"| {name} | {of['cells']} | {' | '.join(cells)} |"


def _miss(one: Result) -> str:
    return f"| {one.name} | {one.verdict} | {', '.join(one.causes) or '-'} | {'; '.join(_faults(one))} |"


def _faults(one: Result) -> list[str]:
    if one.is_right:
        return ["false alarm"]
    told = {
        "not detected": not one.detected,
        "not named first": not one.named_first,
        "not all named": not one.named,
        f"accused of {', '.join(one.undeserved)}": bool(one.undeserved),
    }
    return [word for word, holds in told.items() if holds]


def stored() -> dict[str, Result]:
    """Return the stored cells by name: what earlier runs have judged."""
    cells = json.loads(STORED.read_text())["cells"] if STORED.exists() else []
    names = [field.name for field in fields(Result)]
    return {cell["name"]: Result(**{name: _frozen(cell[name]) for name in names if name in cell}) for cell in cells}


def _cell(one: Result) -> dict[str, Any]:
    """Return a cell as it is stored: without what `gpudist fix` was not asked for."""
    left_out = ("fixed", "tries") if one.fixed is None else ()
    return {name: value for name, value in asdict(one).items() if name not in left_out}


def _with_fix_of(before: Result | None, one: Result) -> Result:
    return one if before is None or one.fixed is not None else replace(one, fixed=before.fixed, tries=before.tries)


def _rounded(one: Result) -> Result:
    return replace(
        one, seconds=round(one.seconds, 1), plain=one.plain and round(one.plain, 1), starts=one.starts and round(one.starts, 2)
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def worse_than_stored(results: Sequence[Result]) -> list[str]:
    """Return what an earlier run had right, or pointed at, and this one has not."""
    before = stored()
    marks: dict[str, Callable[[Result], Any]] = {
        "well judged": lambda one: one.is_well_judged,
        "line right": lambda one: one.line_right,
        "detected": lambda one: one.detected,
        "fixed": lambda one: one.fixed,
    }
    return [
        f"{one.name}: {name} before, now {one.verdict} {', '.join(one.causes)}".rstrip()
        for one in results
        if one.name in before
        for name, mark in marks.items()
        if mark(before[one.name]) and mark(one) is not None and not mark(one)
    ]


def store(results: Sequence[Result], names: Collection[str]) -> None:
    """Write the stored figures and the table of the docs.

    Args:
        results: What was judged; cells that were not stay as they are, and so does what `gpudist fix` made of a cell.
        names: All cells of the scorecard: others are forgotten.
    """
    before = stored()
    judged = {one.name: _with_fix_of(before.get(one.name), one) for one in results}
    cells = {name: one for name, one in {**before, **judged}.items() if name in names}
    every = [_rounded(cells[name]) for name in names if name in cells]
    STORED.write_text(json.dumps({"figures": figures(every), "cells": [_cell(one) for one in every]}, indent=1) + "\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(markdown(every, len(names) - len(every)))
