"""Compose programs until the time is over, and keep each that is judged wrongly, shrunk to the fewest parts.

Usage: python -m benchmarks.scorecard.fuzz [--minutes 30] [--seed N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.scorecard.cells import KEPT, Job, Result, judge_all
from benchmarks.scorecard.generated import Spec, specs

MOST_EXAMPLES = 10_000  # more than any time allows


class Misjudged(AssertionError):
    """A program that gpudist judges wrongly."""

    def __init__(self, spec: Spec, result: Result) -> None:
        super().__init__(f"{spec.name}: {result.verdict} {' '.join(result.causes)}")
        self.spec, self.result = spec, result


@dataclass
class Fuzzer:
    """Searches programs that are judged wrongly; what it found once it does not look for again.

    Attributes:
        until: When to stop, by time.monotonic().
        judged: How many different programs were judged.
    """

    until: float
    judged: int = 0
    _results: dict[str, Result] = field(default_factory=dict)
    _known: set[tuple[object, ...]] = field(default_factory=set)

    def search(self, seeded: int) -> Misjudged | None:
        """Return the next program that is judged wrongly, shrunk; None where the time is over first."""

        @seed(seeded)
        @settings(
            max_examples=MOST_EXAMPLES,
            phases=[Phase.generate, Phase.shrink],
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(specs())
        def check(spec: Spec) -> None:
            self._check(spec)

        try:
            check()
        except Misjudged as found:
            self._known.add(_kind(found.spec, found.result))
            return found
        return None

    def _check(self, spec: Spec) -> None:
        if spec.name not in self._results and time.monotonic() > self.until:
            return  # what was judged before stays as it was, as hypothesis judges the smallest once more
        if spec.name not in self._results:
            self.judged += 1
            (self._results[spec.name],) = judge_all([Job(spec.entry())])
        result = self._results[spec.name]
        if not result.is_well_judged and _kind(spec, result) not in self._known:
            raise Misjudged(spec, result)


def _kind(spec: Spec, result: Result) -> tuple[object, ...]:
    """Return what makes two wrong judgements the same one: what is planted, and what is said."""
    return (spec.bugs, result.verdict, result.causes)


def write(found: Misjudged, folder: Path) -> Path:
    """Write the program with what was said of it, and what is right."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.spec.name}.py"
    said = f"{found.result.verdict}: {', '.join(found.result.causes) or 'no cause'}"
    right = f"{' or '.join(found.spec.answer.verdicts)}: {', '.join(found.spec.bugs) or 'no cause'}"
    path.write_text(
        f"# gpudist verify {path.name} --topology {found.spec.topology}\n# said  {said}\n# right {right}\n{found.spec.text}"
    )
    return path


def main() -> int:
    """Search until the time is over. Exit code 1 where a program was judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--folder", type=Path, default=KEPT / "fuzz")
    wanted = parser.parse_args()
    first = random.SystemRandom().randrange(2**31) if wanted.seed is None else wanted.seed
    print(f"seed {first}", file=sys.stderr)
    fuzzer = Fuzzer(time.monotonic() + 60 * wanted.minutes)
    paths: list[Path] = []
    while time.monotonic() < fuzzer.until and (found := fuzzer.search(first + len(paths))):
        paths.append(write(found, wanted.folder))
        print(f"judged wrongly: {paths[-1]} ({found})", file=sys.stderr, flush=True)
    print(
        f"{fuzzer.judged} programs judged, {len(paths)} kinds of wrong judgements" + (f", in {wanted.folder}" if paths else "")
    )
    return 1 if paths else 0


if __name__ == "__main__":
    sys.exit(main())
