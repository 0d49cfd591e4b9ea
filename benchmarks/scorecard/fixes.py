"""Run `gpudist fix` on the wrong programs of the corpus, for the scorecard's column `fixed`.

All topologies of a program are fixed by one command: its edits are proven on all of them, or the program is not fixed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scorecard.cells import KEPT, Job, Result, timed

TIME_LIMIT = 900.0
"""Seconds that a whole fix may take; the program counts as not fixed then."""


def fix_all(jobs: Iterable[Job], *, fresh: bool = False) -> dict[str, tuple[bool, int | None]]:
    """Fix programs one after the other, and keep each answer as soon as it is there.

    Args:
        jobs: In the order in which they are fixed. Right programs and variants are left out.
        fresh: Whether what an earlier call kept is left aside.

    Returns:
        For each cell whether a proven fix was made, and after how many verifications; None of these without a report.
    """
    wrong = [job for job in jobs if not (job.entry.answer.is_right or job.variant or job.launcher)]
    return {name: seen for job in wrong for name, seen in _fixed(job, fresh).items()}


def with_fixes(results: Sequence[Result], fixes: dict[str, tuple[bool, int | None]]) -> list[Result]:
    """Return results of which those that were fixed, or could not be, say so."""
    return [replace(one, fixed=fixes[one.name][0], tries=fixes[one.name][1]) if one.name in fixes else one for one in results]


def _fixed(job: Job, fresh: bool) -> dict[str, tuple[bool, int | None]]:
    KEPT.mkdir(exist_ok=True)
    kept = KEPT / f"fix-{hashlib.sha256(job.key.encode()).hexdigest()[:24]}.json"
    if fresh or not kept.exists():
        kept.write_text(json.dumps(_fix(job)))
    seen = json.loads(kept.read_text())
    is_fixed = bool(seen.get("fixes")) and all(one["proven"] for one in seen["fixes"])
    for name in job.names.values():
        said = "; ".join(seen.get("not_fixed", ())) or seen.get("message", "")
        print(f"{name}: {'fixed' if is_fixed else f'not fixed. {said[:200]}'}", file=sys.stderr, flush=True)
    return dict.fromkeys(job.names.values(), (is_fixed, seen.get("verifications")))


def _fix(job: Job) -> dict[str, Any]:
    """Return the report of `gpudist fix`, without its verdicts."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "fix.json")
        command = [sys.executable, "-m", "emulate", "fix", str(job.entry.path), *job.arguments, "--json", str(written)]
        _, error = timed([*command, "--", *job.entry.args], folder, TIME_LIMIT)
        report = json.loads(written.read_text()) if written.exists() else {"message": error[-2000:]}
    return {key: value for key, value in report.items() if key not in ("before", "after")}
