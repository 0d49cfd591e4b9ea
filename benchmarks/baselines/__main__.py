"""Run every program of fixtures/corpus on one device and on its topologies, ask the alternatives, and write docs/baselines.md.

Goes on where it was stopped: what was run is kept in benchmarks/baselines/stored.json, until a program or these sources change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.baselines.alternatives import ALTERNATIVES
from benchmarks.baselines.page import Judged, page
from benchmarks.baselines.runs import ONE_STEP, ROOT, SCRIPTS, WATCHED, Run, run
from fixtures.corpus.index import FOLDER, Program, programs

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "baselines.md"
STORED = HERE / "stored.json"
SIDE_BY_SIDE = 2
LARGEST = 1e12
"""Stands for infinity in the stored scores, for which JSON has no word."""


def judge(program: Program) -> dict[str, Any]:
    """Run a program everywhere, and return what is stored of it."""
    # Without GPUs TensorFlow has one replica on each of several hosts.
    places = dict.fromkeys(at if at.startswith("1x") else f"{at.partition('x')[0]}x1" for at in program.topologies)
    runs: dict[str, tuple[Run, ...]] = {
        script: tuple(run(program, at, script) for at in ("1x1", *places)) for script in (WATCHED, ONE_STEP)
    }
    has_ended = all(one.has_ended for its in runs.values() for one in its)
    seconds = {script: round(sum(one.seconds for one in its) / len(places), 1) for script, its in runs.items()}
    print(f"{program.id}: {seconds}{'' if has_ended else ' does not end'}", file=sys.stderr, flush=True)
    scores = {}
    for one in ALTERNATIVES if has_ended else ():
        alone, *several = runs[one.script]
        scores[one.name] = _highest(one.score(its, alone) for its in several)
    return {"digest": digest(program), "has_ended": has_ended, "scores": scores, "seconds": seconds}


def _highest(scores: Iterable[float | None]) -> float | None:
    return max((min(score, LARGEST) for score in scores if score is not None), default=None)


@cache
def digest(program: Program) -> str:
    """Return a digest of what the runs and the scores of a program depend on."""
    own = (HERE / "runs.py", HERE / "alternatives.py", HERE / "dispersion.py", *sorted(SCRIPTS.iterdir()))
    sources = (program.path, FOLDER / "parts.py", FOLDER / "plain.py", *(path for path in own if path.is_file()))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def stored() -> list[Judged]:
    """Return what is stored of programs as they are now."""
    kept = json.loads(STORED.read_text()) if STORED.exists() else {}
    return [
        Judged(program, its["has_ended"], its["scores"], its["seconds"])
        for program in programs()
        if (its := kept.get(program.id)) and its["digest"] == digest(program)
    ]


def _store(judged: dict[str, dict[str, Any]]) -> None:
    kept = json.loads(STORED.read_text()) if STORED.exists() else {}
    STORED.write_text(json.dumps(dict(sorted({**kept, **judged}.items())), indent=1) + "\n")


def main() -> int:
    """Run the programs that are not stored, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    parser.add_argument("--fresh", action="store_true", help="run again what is stored")
    wanted = parser.parse_args()
    chosen = [program for program in programs() if wanted.only in program.id]
    if not chosen:
        parser.error(f"--only must name programs of the collection. Received: --only {wanted.only}.")
    known = () if wanted.fresh else {one.program.id for one in stored()}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        rest = [program for program in chosen if program.id not in known]
        for program, its in zip(rest, pool.map(judge, rest), strict=True):
            _store({program.id: its})
    text = page(stored(), len(programs()))
    PAGE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
