"""What `gpudist verify` says of one feature: a verdict for each column of the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.features.feature import FEATURES, TOPOLOGIES
from emulate import verify
from emulate.cluster import Preload

PROGRAM = Path(__file__).resolve().parent / "program.py"
SIDES = ("ours", "keras")
CENTRAL = "1x2 central"  # CentralStorageStrategy on 1x2
COLUMNS = (*TOPOLOGIES, CENTRAL)
ALLOWED = {"keras": ("identical-dropout",), "ours": ()}


def cells(name: str, side: str, preload: Preload | None = None, columns: Sequence[str] = COLUMNS) -> dict[str, Any]:
    """The verdicts on one feature.

    Args:
        name: Its name.
        side: `ours` or `keras`.
        preload: A pre-loaded parent for all runs.
        columns: Which columns.

    Returns:
        For each column the verdict, its first cause, by how much the first tensor that diverges does, and what was raised.
    """
    nothing = [c for c in columns if FEATURES[name].sharded and side == "keras"]  # plain Keras has no table in slices
    found: dict[str, Any] = {column: {"verdict": "none", "cause": None, "error": None, "raised": None} for column in nothing}
    columns = [column for column in columns if column not in nothing]
    for kind in ("auto", "central-storage"):
        topologies = [c for c in columns if c != CENTRAL] if kind == "auto" else ["1x2"] * (CENTRAL in columns)
        if topologies:
            verdict = verify(PROGRAM, topologies, args=(name, side, kind), steps=12, allow=ALLOWED[side], preload=preload)
            found |= {CENTRAL if kind != "auto" else run.topology: _cell(run) for run in verdict.runs}
    return found


def _cell(run: Any) -> dict[str, Any]:
    first = run.first_divergence
    deciding = [cause.code for cause in run.causes if not cause.allowed]
    return {
        "verdict": run.verdict,
        "cause": deciding[0] if deciding else None,
        "error": float(f"{first.error:.2g}") if first is not None and first.error is not None else None,
        "raised": _raised(run.failure),
    }


def _raised(failure: str | None) -> str | None:
    """The kind of error that ended a run, without its modules: the last line of a traceback that names one."""
    named = [match[1] for line in (failure or "").splitlines() if (match := re.match(r"(?:\w+\.)*([A-Z]\w+)(?::|$)", line))]
    return named[-1] if named else None
