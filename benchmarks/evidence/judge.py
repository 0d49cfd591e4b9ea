"""Judge stored cells again with the sources as they are now, and say what has changed."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.evidence.recording import with_runner
from benchmarks.evidence.store import is_stored, name_of
from benchmarks.evidence.stored import Asked, StoredRunner
from benchmarks.scorecard.cells import Job, assess
from emulate.cluster import Preload
from emulate.program import Program
from emulate.verify import verify


@dataclass(frozen=True)
class Judged:
    """What is said now of a cell on one topology.

    Attributes:
        run: As `--json` has it.
        recorded: The same of when it was recorded.
    """

    name: str
    run: dict[str, Any]
    recorded: dict[str, Any]
    is_well_judged: bool

    @property
    def is_same(self) -> bool:
        """Return whether all is said as it was then, but how long it took, and in which folder the program lies."""
        return _comparable(self.run) == _comparable(self.recorded)

    @property
    def is_same_verdict(self) -> bool:
        """Return whether verdict and causes are those of then."""
        return verdict_of(self.run) == verdict_of(self.recorded)


def _comparable(run: dict[str, Any]) -> str:
    return re.sub(r'[^\s"(]*/fixtures/', "fixtures/", json.dumps({**run, "seconds": 0}, sort_keys=True))


def verdict_of(run: dict[str, Any]) -> tuple[str, ...]:
    """Return a verdict with the codes of its causes, in their order."""
    return (run["verdict"], *(cause["code"] for cause in run["causes"]))


def judge_cell(job: Job, folder: Path, preload: Preload | None = None) -> tuple[list[Judged], Asked]:
    """Judge a stored cell.

    Args:
        job: The cell.
        folder: The folder of all evidence.
        preload: A pre-loaded parent for what is evaluated; one of its own unless given.

    Returns:
        What is said on each topology, and what was asked for.
    """
    cell, asked = folder / name_of(job), Asked()
    recorded = json.loads((cell / "verdict.json").read_text())
    options = _options(job)
    program = Program.find(str(job.entry.path), job.entry.args)
    with with_runner(partial(StoredRunner, cell, asked)):
        verdict = verify(program, job.entry.topologies, preload=preload, **options)
    runs = json.loads(json.dumps(verdict.to_json()))["runs"]
    judged = [
        Judged(job.names[run["topology"]], run, before, _is_well_judged(job, run))
        for run, before in zip(runs, recorded["runs"], strict=True)
    ]
    return judged, asked


def _options(job: Job) -> dict[str, Any]:
    """Return the options of a job as arguments of `verify`; the scorecard has no others."""
    names = [name.removeprefix("--") for name in job.options[::2]]
    return {name: int(value) if name == "seed" else value for name, value in zip(names, job.options[1::2], strict=True)}


def _is_well_judged(job: Job, run: dict[str, Any]) -> bool:
    return assess(job, run["topology"], {**run, "plain": None}).is_well_judged


def judge_stored(jobs: Sequence[Job], folder: Path) -> int:
    """Judge the jobs that are stored, and print what is said; return 1 where that is not what was recorded."""
    stored = [job for job in jobs if is_stored(job, folder)]
    print(f"{folder}: {len(stored)} of {len(jobs)} cells are there.", flush=True)
    totals: Counter[str] = Counter()
    started = time.monotonic()
    with Preload(modules=("emulate.verify",)) as preload:
        for job in stored:
            try:
                judged, asked = judge_cell(job, folder, preload)
            except Exception:  # the next one may be judged all the same
                print(f"{name_of(job)}: no judgement\n{traceback.format_exc()}", flush=True)
                totals["no judgement"] += 1
                continue
            totals.update(_print(job, judged, asked))
    print(f"{len(stored)} programs in {time.monotonic() - started:.0f} s: {_counts(totals)}")
    return 1 if totals["otherwise"] or totals["no judgement"] else 0


def _print(job: Job, judged: Sequence[Judged], asked: Asked) -> Counter[str]:
    """Print what is said of a job, and return it counted."""
    counts = Counter(
        {"evaluations stored": len(asked.stored), "evaluated now": len(asked.evaluated), "starts lacking": len(asked.lacking)}
    )
    answer = job.entry.answer
    for one in judged:
        same = "same" if one.is_same else "same verdict" if one.is_same_verdict else f"was {' '.join(verdict_of(one.recorded))}"
        well = "right" if one.is_well_judged else f"expected {' '.join((*answer.verdicts, *answer.causes))}"
        print(f"{one.name}: {' '.join(verdict_of(one.run))}; {well}; {same}")
        counts.update(["cells", *(["right"] if one.is_well_judged else []), same if one.is_same_verdict else "otherwise"])
    print(f"    evaluations: {len(asked.stored)} stored, {len(asked.evaluated)} made now")
    for label in asked.lacking:
        print(f"    needs a start: {label}", flush=True)
    return counts


def _counts(totals: Counter[str]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in totals.items())
