"""The scorecard's figures, its table in the docs, and what has become worse than the stored figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scorecard.cells import ROOT, Result

STORED = Path(__file__).resolve().parent / "stored.json"
"""The figures of the last whole run, which a later one must not fall behind."""
PAGE = ROOT / "docs" / "scorecard_table.md"
_HEAD = "| programs | cells | detected | named first | all named | line right | false alarms | unexplained | starts | cost |"


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
        "starts_median": median(starts) if starts else None,
        "starts_most": max(starts, default=None),
        "cost_median": round(median(costs), 1) if costs else None,
    }


def _count(results: Sequence[Result], holds: Callable[[Result], bool]) -> int:
    return sum(holds(one) for one in results)


def misses(results: Sequence[Result]) -> list[Result]:
    """Return the cells that are judged wrongly, the line apart."""
    return [one for one in results if not one.is_well_judged]


def markdown(results: Sequence[Result]) -> str:
    """Return the table, and the list of what is judged wrongly, as a part of a page of the docs."""
    rows = [_row(name, of) for name, of in figures(results).items()]
    found = misses(results)
    lines = [_HEAD, "|" + " --- |" * 10, *rows, "", f"Judged wrongly ({len(found)} of {len(results)} cells):", ""]
    lines += ["| program | verdict | causes | what is wrong |", "| --- | --- | --- | --- |", *map(_miss, found)]
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


def worse_than_stored(results: Sequence[Result]) -> list[str]:
    """Return what an earlier run had right, or pointed at, and this one has not."""
    if not STORED.exists():
        return []
    before = {one["name"]: one for one in json.loads(STORED.read_text())["cells"]}
    return [
        f"{one.name}: {name.replace('_', ' ')} before, now {one.verdict} {', '.join(one.causes)}".rstrip()
        for one in results
        if one.name in before
        for name in ("well_judged", "line_right", "detected")
        if before[one.name][name] and not _marks(one)[name]
    ]


def _marks(one: Result) -> dict[str, Any]:
    plain = None if one.plain is None else round(one.plain, 1)
    return {**one.stable(), "well_judged": one.is_well_judged, "seconds": round(one.seconds, 1), "plain": plain}


def store(results: Sequence[Result]) -> None:
    """Write the stored figures and the table of the docs."""
    STORED.write_text(json.dumps({"figures": figures(results), "cells": [_marks(one) for one in results]}, indent=1) + "\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(markdown(results))
