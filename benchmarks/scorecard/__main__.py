"""Judge the corpus, and say how many bugs gpudist finds, names and locates, and how many right programs it accuses.

Goes on where it was stopped. Fails (exit code 1) where something that the stored figures have right is wrong now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.scorecard import table
from benchmarks.scorecard.cells import Job, judge_all
from benchmarks.scorecard.corpus import corpus
from benchmarks.scorecard.fixes import fix_all, with_fixes
from benchmarks.scorecard.generated import drawn
from benchmarks.scorecard.partners import partners
from benchmarks.scorecard.variants import planted, variants


def jobs(only: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of a group, or those whose name contains one of the words; without words all."""
    every = [*(Job(entry) for entry in (*corpus(), *partners(), *drawn())), *variants(), *planted()]
    return [job for job in every if not only or any(word == job.entry.group or word in job.entry.name for word in only)]


def main() -> int:
    """Judge, print, write what `--store` asks for. Exit code 1 where it is worse than the stored figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="cells with this in their name; may be repeated"
    )
    parser.add_argument("--fresh", action="store_true", help="judge again what an earlier call has judged")
    parser.add_argument(
        "--store", action="store_true", help="write what was judged to the stored figures and the table of the docs"
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="judge nothing: run gpudist fix on the stored cells of wrong programs, for the column fixed",
    )
    wanted = parser.parse_args()
    if wanted.fix:
        fixes = fix_all(jobs(wanted.only), fresh=wanted.fresh)
        results = with_fixes([one for name, one in table.stored().items() if name in fixes], fixes)
    else:
        results = judge_all(jobs(wanted.only), fresh=wanted.fresh)
    if not results:
        parser.error(f"--only must name programs of the scorecard. Received: --only {' '.join(wanted.only)}.")
    Console(width=160).print(Markdown(table.markdown(results)))
    worse = table.worse_than_stored(results)
    if not table.STORED.exists():
        print("There are no stored figures to compare with: store some with --store.", file=sys.stderr)
    for line in worse:
        print(f"WORSE than the stored figures: {line}", file=sys.stderr)
    if wanted.store:
        table.store(results, [name for job in jobs() for name in job.names.values()])
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
