"""Run every program of fixtures/corpus on one device and on its topologies, ask the alternatives, and write docs/baselines.md.

Usage: python -m benchmarks.baselines [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.alternatives import ALTERNATIVES, THRESHOLDS, loss_differs, weights_differ
from benchmarks.baselines.runs import ROOT, Run, run
from fixtures.corpus.index import Program, programs

PAGE = ROOT / "docs" / "baselines.md"
STORED = ROOT / "benchmarks" / "scorecard" / "stored.json"
SIDE_BY_SIDE = 2


@dataclass(frozen=True)
class Judged:
    """A program with its run on one device and those on its topologies."""

    program: Program
    one: Run
    several: tuple[Run, ...]

    def is_accused(self, accuses: Callable[[Run, Run], bool]) -> bool:
        """Return whether a check accuses the program on one of its topologies."""
        return any(accuses(run, self.one) for run in self.several)

    @property
    def has_ended(self) -> bool:
        """Return whether all of its runs did: then there is something to compare."""
        return all(run.has_ended for run in (self.one, *self.several))


def judge(program: Program) -> Judged:
    """Run a program everywhere."""
    arguments = program.arguments[:1]
    # Without GPUs TensorFlow has one replica on each of several hosts.
    places = dict.fromkeys(at if at.startswith("1x") else f"{at.partition('x')[0]}x1" for at in program.topologies)
    judged = Judged(program, run(program, "1x1", arguments), tuple(run(program, at, arguments) for at in places))
    print(f"{program.id}: {sum(one.seconds for one in (judged.one, *judged.several)):.0f} s", file=sys.stderr, flush=True)
    return judged


def table(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines of the page."""
    fails = [one.program.id for one in judged if not one.has_ended]
    judged = [one for one in judged if one.has_ended]
    wrong, right = ([one for one in judged if one.program.is_wrong is kind] for kind in (True, False))
    per_program = statistics.median(
        (one.one.seconds + sum(r.seconds for r in one.several)) / len(one.several) for one in judged
    )
    yield "| check | after | wrong programs found | right programs accused | cause named | line named | seconds |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for one in ALTERNATIVES:
        found, accused = (sum(its.is_accused(one.accuses) for its in group) for group in (wrong, right))
        counts = f"{found} of {len(wrong)} | {accused} of {len(right)}"
        yield f"| {one.name} | {one.origin} | {counts} | no | no | {per_program:.1f} |"
    yield _of_gpudist({one.program.id for one in judged})
    yield ""
    yield f"Left out are programs that do not end on one device or on several: {', '.join(fails) or 'none'}."
    yield ""
    yield "The thresholds with which most programs are judged rightly:"
    yield ""
    for name, check in (("the last loss", loss_differs), ("final weights", weights_differ)):
        yield f"- {name}: {_best(wrong, right, check)}"


def _best(wrong: Sequence[Judged], right: Sequence[Judged], check: Callable[[float], Callable[[Run, Run], bool]]) -> str:
    def counts(threshold: float) -> tuple[int, int]:
        return tuple(sum(one.is_accused(check(threshold)) for one in group) for group in (wrong, right))  # type: ignore[return-value]

    best = max(THRESHOLDS, key=lambda threshold: counts(threshold)[0] - counts(threshold)[1])
    found, accused = counts(best)
    return f"{best:g} finds {found} of {len(wrong)}, and accuses {accused} of {len(right)}"


def _of_gpudist(names: set[str]) -> str:
    """Return gpudist's own line, from the stored scorecard."""
    cells = [cell for cell in json.loads(STORED.read_text())["cells"] if cell["group"] == "corpus"]
    by_program: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if (name := cell["name"].partition(" ")[0]) in names:
            by_program.setdefault(name, []).append(cell)
    wrong, right = ([its for its in by_program.values() if its[0]["is_right"] is kind] for kind in (False, True))
    found = sum(all(cell["detected"] for cell in its) for its in wrong)
    accused = sum(any(cell["false_alarm"] for cell in its) for its in right)
    first = sum(all(cell["named_first"] for cell in its) for its in wrong)
    lines = [its for its in wrong if its[0]["line_right"] is not None]
    named = sum(all(cell["line_right"] for cell in its) for its in lines)
    seconds = statistics.median(cell["seconds"] for cell in cells)
    counts = f"{found} of {len(wrong)} | {accused} of {len(right)} | {first} of {len(wrong)} | {named} of {len(lines)}"
    return f"| **gpudist** | `make scorecard` | {counts} | {seconds:.1f} |"


def main() -> int:
    """Run all programs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name; writes no page")
    wanted = parser.parse_args()
    chosen = [program for program in programs() if wanted.only in program.id]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        judged = list(pool.map(judge, chosen))
    text = "\n".join(table(judged)) + "\n"
    print(text)
    if not wanted.only:
        Path(PAGE).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
