"""The right partners of the corpus's wrong programs: they lack the bug alone, so who accuses one has not found the bug."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.scorecard.cells import KEPT
from benchmarks.scorecard.corpus import GOOD, Answer, Entry, read
from fixtures.corpus.index import Program, programs
from fixtures.corpus.partners import write_partner

FOLDER = KEPT / "partners"


def partners(folder: Path = FOLDER) -> list[Entry]:
    """Write the right partner of each wrong program into a folder, and return them as entries of the scorecard."""
    return [entry for program in programs() if program.is_wrong for entry in _of(program, folder)]


def _of(program: Program, folder: Path) -> list[Entry]:
    path = write_partner(program, folder)
    return [
        replace(entry, name=f"partner/{entry.name}", path=path, answer=Answer(GOOD), group="partner")
        for entry in read(program.path)
    ]
