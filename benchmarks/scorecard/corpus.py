"""The programs that the scorecard judges, and the right answer to each: fixtures/corpus tells it in docstrings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fixtures.corpus import index
from fixtures.corpus.index import marked_lines
from fixtures.manifest import BUGS, PROGRAMS, Fixture

GOOD = ("equivalent", "by-design")
_FROM_MANIFEST = ("2x2", "1x4")
"""Where a program of the manifest is judged: on the first of these that it allows."""


@dataclass(frozen=True)
class Answer:
    """The right answer to a program.

    Attributes:
        verdicts: The verdicts that are right.
        causes: The codes of what is wrong; empty for a right program. The first must come first, unless `any_first`.
        lines: The lines to point at; empty where no line is to blame.
        any_first: Whether any of the causes may come first.
    """

    verdicts: tuple[str, ...]
    causes: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    any_first: bool = False

    @property
    def is_right(self) -> bool:
        """Return whether the program is right: nothing is to be found in it."""
        return not self.causes and bool(set(self.verdicts) & set(GOOD))


@dataclass(frozen=True)
class Entry:
    """One program of the scorecard.

    Attributes:
        name: Its name in tables, unique.
        path: The script.
        topologies: Where it is judged.
        answer: What must be said of it.
        args: Its command-line arguments.
        source: Where the bug was reported.
    """

    name: str
    path: Path
    topologies: tuple[str, ...]
    answer: Answer
    args: tuple[str, ...] = ()
    source: str = ""
    group: str = field(default="corpus", kw_only=True)


def read(path: Path) -> list[Entry]:
    """Return the entry of a program of the corpus; of one that is judged with several arguments, one for each."""
    program = index.read(path)
    answer = Answer(program.verdicts, program.causes, program.lines)
    entry = Entry(program.id, path, program.topologies, answer, source=", ".join(program.sources))
    return [replace(entry, name=f"{program.id} {one}", args=(one,)) for one in program.arguments] or [entry]


def corpus() -> tuple[Entry, ...]:
    """Return all programs of fixtures/corpus, then those of the manifest."""
    programs = [entry for program in index.programs() for entry in read(program.path)]
    return (*programs, *(_of_manifest(one) for one in (*PROGRAMS, *BUGS) if one.verdicts != ("wrong-use",)))


def _of_manifest(fixture: Fixture) -> Entry:
    place = next((one for one in _FROM_MANIFEST if one in fixture.topologies), fixture.topologies[0])
    causes = () if fixture.cause is None else (fixture.cause,)
    answer = Answer(fixture.verdicts, causes, marked_lines(fixture.path.read_text()) if causes else ())
    return Entry(f"{fixture.path.parent.name}/{fixture.name}", fixture.path, (place,), answer, group="manifest")
