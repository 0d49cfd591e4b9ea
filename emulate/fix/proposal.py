"""Describe proposals: an edit, where it is wanted, and what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from emulate.fix.names import Names
from emulate.fix.source import Change, Source

PLAIN, CORE = "plain", "core"


@dataclass(frozen=True)
class Proposal:
    """Describe an edit of one file.

    Attributes:
        words: What it does, in the imperative.
        changes: What stands elsewhere in the file's text.
        form: `plain` for TensorFlow and Keras alone, `core` where it uses gpudist_core.
    """

    words: str
    changes: tuple[Change, ...]
    form: str = PLAIN


@dataclass(frozen=True)
class Site:
    """Describe where an edit is wanted.

    Attributes:
        source: The file.
        names: What it calls things.
        line: The line of the finding.
        fixes: The headings of the finding's fixes.
    """

    source: Source
    names: Names
    line: int
    fixes: Sequence[str] = ()

    @property
    def statement(self) -> cst.SimpleStatementLine | None:
        """Return the statement of the line."""
        return self.source.statement(self.line)


Edit = Callable[[Site], Iterator[Proposal]]


def of_line(edit: Callable[[cst.SimpleStatementLine, Source, Names], Iterator[Proposal]]) -> Edit:
    """Make an edit that is tried where the line has a statement and its file imports TensorFlow."""

    def propose_at(site: Site) -> Iterator[Proposal]:
        if site.statement is not None and site.names.tf is not None:
            yield from edit(site.statement, site.source, site.names)

    return propose_at
