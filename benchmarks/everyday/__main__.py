"""Judge ordinary programs, and say how many right ones gpudist accuses. Fails (exit code 1) where it accuses one.

Usage: python -m benchmarks.everyday [--number 400] [--seed N] [--bugs] [--minutes M] [--store LABEL]

Goes on where it was stopped. What is judged wrongly is shrunk to the fewest choices and kept in .scorecard/everyday/wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.everyday.choices import Program, draw, simpler
from benchmarks.everyday.text import text
from benchmarks.scorecard.cells import KEPT, SIDE_BY_SIDE, Job, Result, judge_all
from benchmarks.scorecard.corpus import Answer, Entry
from benchmarks.scorecard.table import figures
from fixtures.corpus.index import marked_lines

FOLDER = KEPT / "everyday"
STORED = Path(__file__).resolve().parent / "stored.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "everyday_table.md"
OPTIONS = {
    "all": ("--steps", "all"),
    "one": ("--steps", "1"),
    "sixty-one": ("--steps", "61"),
    "float64": ("--precision", "float64"),
    "virtual": ("--virtual",),
}
_WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "bash", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"',
    "_",
)
"""Starts a command that may make no namespaces: Docker's default, and many CI runners."""
_MOST_TRIES = 12
"""Simpler programs are tried so often: each is a verification."""


def job(program: Program) -> Job:
    """Write a program and return how it is judged."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{program.name}.py"
    path.write_text(text(program))
    topologies = (program.topology, "1x2") if program.verify == "two" else (program.topology,)
    may_differ = program.noise != "none" or program.normalization == "batch"
    good = ("by-design", "equivalent") if program.by_design and may_differ else ("equivalent",)
    causes = (program.bug,) if program.bug else ()
    answer = Answer(("divergent",) if program.bug else good, causes, marked_lines(path.read_text()))
    launcher = _WITHOUT_NAMESPACES if program.verify == "no-namespaces" else ()
    entry = Entry(program.name, path, topologies, answer, source=program.chosen, group="everyday")
    return Job(entry, OPTIONS.get(program.verify, ()), launcher=launcher)


def is_wrong(program: Program, results: Sequence[Result]) -> bool:
    """Return whether a judgement is wrong: a right program accused or not judged, or a bug missed or named wrongly."""
    return any(not one.is_well_judged or (not program.bug and set(one.causes) - set(program.by_design)) for one in results)


def judged(programs: Sequence[Program], until: float, side_by_side: int) -> Iterator[tuple[Program, list[Result]]]:
    """Judge programs until the time is over, in their order."""
    for start in range(0, len(programs), side_by_side):
        if time.monotonic() > until:
            return
        some = programs[start : start + side_by_side]
        jobs = [job(program) for program in some]
        results = judge_all(jobs, side_by_side=side_by_side)
        for program, its in zip(some, jobs, strict=True):
            yield program, [one for one in results if one.name in its.names.values()]


def shrunk(program: Program, results: list[Result], until: float) -> tuple[Program, list[Result]]:
    """Return the simplest program that is judged as wrongly: the same verdict with the same first cause."""
    tries, kind = 0, _kind(results)
    changed = True
    while changed:
        changed = False
        for candidate in simpler(program):
            if tries >= _MOST_TRIES or time.monotonic() > until:
                return program, results
            tries += 1
            found = judge_all([job(candidate)])
            if is_wrong(candidate, found) and _kind(found) == kind:
                program, results, changed = candidate, found, True
                break
    return program, results


def _kind(results: Sequence[Result]) -> tuple[str, ...]:
    wrong = next((one for one in results if not one.is_well_judged), results[0])
    return (wrong.verdict, *wrong.causes[:1])


def keep(program: Program, results: Sequence[Result]) -> Path:
    """Write a program that is judged wrongly, with what was said of it."""
    folder = FOLDER / "wrong"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program.name}.py"
    said = "; ".join(f"{one.name}: {one.verdict} {', '.join(one.causes)}".rstrip() for one in results)
    right = program.bug or "equivalent" + " or by-design" * bool(program.by_design)
    path.write_text(f"# said  {said}\n# right {right}; judged with {' '.join(job(program).arguments)}\n{text(program)}")
    return path


def summary(rows: Sequence[tuple[Program, Sequence[Result]]]) -> dict[str, Any]:
    """Return the figures of what was judged."""
    results = [one for _, some in rows for one in some]
    wrong = [(program, one) for program, some in rows for one in some if is_wrong(program, [one])]
    starts = [one.starts for one in results if one.starts is not None]
    accused = [one for _, one in wrong if one.verdict in ("divergent", "by-design")]
    seconds = [one.seconds for one in results]
    return {
        "programs": len(rows),
        "cells": len(results),
        "wrong": len({program.name for program, _ in wrong}),
        "accused": len(accused),
        "unverified": sum(one.verdict == "unverified" for one in results),
        "other": sum(one.verdict not in ("divergent", "by-design", "unverified") for _, one in wrong),
        "starts_median": median(starts) if starts else None,
        "starts_most": max(starts, default=None),
        "seconds_median": round(median(seconds), 1) if seconds else None,
        "seconds_most": round(max(seconds, default=0.0), 1),
        **({key: figures(results)["all"][key] for key in ("detected", "named_first", "line_right", "with_line")}),
    }


def main() -> int:
    """Judge, shrink, print. Exit code 1 where something is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--bugs", action="store_true", help="switch one bug on in each program")
    parser.add_argument("--minutes", type=float, default=1e6, help="judge no more programs after so many minutes")
    parser.add_argument("--shrink", type=float, default=0.0, metavar="MINUTES", help="then shrink what is judged wrongly")
    parser.add_argument("--jobs", type=int, default=SIDE_BY_SIDE, help="programs that are judged side by side")
    parser.add_argument("--store", metavar="LABEL", help="write the figures under this name, and the table of the docs")
    wanted = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if wanted.seed is None else wanted.seed
    print(f"seed {seed}", file=sys.stderr)
    programs = draw(wanted.number, seed, wanted.bugs)
    rows = list(judged(programs, time.monotonic() + 60 * wanted.minutes, wanted.jobs))
    wrong = [(program, results) for program, results in rows if is_wrong(program, results)]
    figures_of = {"seed": seed, "bugs": wanted.bugs, **summary(rows)}
    until = time.monotonic() + 60 * wanted.shrink
    for program, results in wrong:
        path = keep(*(shrunk(program, results, until) if wanted.shrink else (program, results)))
        said = "; ".join(f"{one.verdict} {', '.join(one.causes)}".rstrip() for one in results)
        print(f"judged wrongly: {said} ({program.chosen}): {path}", flush=True)
    print(json.dumps(figures_of, indent=1))
    if wanted.store:
        store(wanted.store, figures_of)
    return 1 if wrong else 0


def store(label: str, figures_of: dict[str, Any]) -> None:
    """Write figures under a label, and the table of the docs from all that are stored."""
    rows = json.loads(STORED.read_text()) if STORED.exists() else {}
    rows[label] = figures_of
    STORED.write_text(json.dumps(rows, indent=1) + "\n")
    head = "| programs | judged | wrongly | accused | unverified | failed, hung | starts: median, most | seconds |"
    lines = [head, "|" + " --- |" * 8]
    for name, of in rows.items():
        right = f"{of['wrong']} of {of['programs']}"
        if of["bugs"]:
            right += (
                f" (detected {of['detected']}, named first {of['named_first']}, line {of['line_right']} of {of['with_line']})"
            )
        starts = f"{of['starts_median']:g}, {of['starts_most']:g}"
        cells = [name, of["programs"], right, of["accused"], of["unverified"], of["other"], starts]
        lines.append(f"| {' | '.join(map(str, cells))} | {of['seconds_median']}, {of['seconds_most']} |")
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
