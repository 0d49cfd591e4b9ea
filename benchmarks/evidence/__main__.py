"""Record the evidence of the scorecard's cells, and judge it again without starting a program.

Usage: python -m benchmarks.evidence record [--only WORD] [--in FOLDER] [--all] [--jobs N]
       python -m benchmarks.evidence judge [--only WORD] [--in FOLDER] [--all]

Evidence lies in .evidence/HASH, of the sources that record: those that judge may change beside it. `record` goes on where it
was stopped. `judge` takes evidence of other sources from another FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.record import record
from benchmarks.evidence.store import folder_of_sources
from benchmarks.scorecard.__main__ import jobs
from benchmarks.scorecard.cells import Job


def wanted_jobs(only: Sequence[str], every: bool) -> list[Job]:
    """Return programs of the corpus and of the manifest, or of the whole scorecard, wrong ones first."""
    some = [job for job in jobs(only) if every or job.entry.group in ("corpus", "manifest")]
    return sorted(some, key=lambda job: (job.entry.answer.is_right, job.entry.group))


def main() -> int:
    """Record or judge. Exit code 1 where a cell could not be recorded, or is judged otherwise than when it was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "judge"):
        command = commands.add_parser(name)
        command.add_argument("--only", action="append", default=[], metavar="WORD", help="cells with this in their name")
        command.add_argument("--in", type=Path, dest="folder", metavar="FOLDER", help="default: that of the sources")
        command.add_argument("--all", action="store_true", help="generated programs, variants and seeds, too")
    commands.choices["record"].add_argument("--jobs", type=int, default=2, metavar="N", help="so many at a time")
    asked = parser.parse_args()
    wanted = wanted_jobs(asked.only, asked.all)
    if not wanted:
        parser.error(f"--only must name programs of the scorecard. Received: --only {' '.join(asked.only)}.")
    folder = (asked.folder or folder_of_sources()).absolute()
    if asked.command == "record":
        return record(wanted, folder, asked.jobs)
    from benchmarks.evidence.judge import judge_stored

    return judge_stored(wanted, folder)


if __name__ == "__main__":
    sys.exit(main())
