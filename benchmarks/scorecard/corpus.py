"""The programs that the scorecard judges, and the right answer to each.

A program of fixtures/corpus tells its answer in its docstring: the first line says what it does, then come lines such as

    Source: keras#16285
    Cause: loss-scaling
    On: 1x4 2x2

`Cause` (several, separated by blanks; the first comes first) stands in wrong programs alone, `Verdict` where another than
`divergent` or `equivalent` is right, `Each` where it is judged with each of several arguments. `# BUG` marks the lines to
point at.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from fixtures.manifest import BUGS, PROGRAMS, Fixture

GOOD = ("equivalent", "by-design")
FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "corpus"
MARK = "# BUG"
_FIELD = re.compile(r"^(Source|Cause|On|Verdict|Each): (.+)$", re.MULTILINE)
_HEADS = ("right_", "wrong_")
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
    """Read a program of the corpus with its answer.

    Args:
        path: A file `right_*.py` or `wrong_*.py`.

    Returns:
        The entry; of a program that is judged with several arguments, one for each.

    Raises:
        ValueError: When its docstring lacks a field, or a wrong program a cause.
    """
    text = path.read_text()
    fields = dict(_FIELD.findall(ast.get_docstring(ast.parse(text)) or ""))
    is_wrong = path.stem.startswith("wrong_")
    needed = {"On", "Cause", "Source"} if is_wrong else {"On"}
    if lacking := sorted(needed - set(fields)):
        raise ValueError(
            f"A program of the corpus must tell {', '.join(sorted(needed))}. Received: {path.name} without {lacking}."
        )
    if not is_wrong and "Cause" in fields:
        raise ValueError(f"A right program has no cause. Received: {path.name} with Cause: {fields['Cause']}.")
    verdicts = tuple(fields.get("Verdict", "divergent" if is_wrong else "equivalent").split())
    answer = Answer(verdicts, tuple(fields.get("Cause", "").split()), marked_lines(text))
    entry = Entry(path.stem, path, tuple(fields["On"].split()), answer, source=fields.get("Source", ""))
    given = fields.get("Each", "").split()
    return [replace(entry, name=f"{path.stem} {one}", args=(one,)) for one in given] or [entry]


def marked_lines(text: str) -> tuple[int, ...]:
    """Return the numbers, from 1, of the lines that carry the mark.

    At the end of a statement it stands for all its lines, and in a line of its own for the next one.
    """
    lines = list(enumerate(text.splitlines(), 1))
    marked = {
        number + at for number, line in lines if MARK in line for at in ((0, 1) if line.lstrip().startswith("#") else (0,))
    }
    simple = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    whole = [range(one.lineno, one.end_lineno + 1) for one in simple if one.end_lineno in marked]
    return tuple(sorted(marked.union(*whole)))


def corpus() -> tuple[Entry, ...]:
    """Return all programs of fixtures/corpus, then those of the manifest."""
    files = sorted(path for path in FOLDER.glob("*.py") if path.name.startswith(_HEADS))
    programs = [entry for path in files for entry in read(path)]
    return (*programs, *(_of_manifest(one) for one in (*PROGRAMS, *BUGS) if one.verdicts != ("wrong-use",)))


def _of_manifest(fixture: Fixture) -> Entry:
    place = next((one for one in _FROM_MANIFEST if one in fixture.topologies), fixture.topologies[0])
    causes = () if fixture.cause is None else (fixture.cause,)
    answer = Answer(fixture.verdicts, causes, marked_lines(fixture.path.read_text()) if causes else ())
    return Entry(f"{fixture.path.parent.name}/{fixture.name}", fixture.path, (place,), answer, group="manifest")
