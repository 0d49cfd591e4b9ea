"""Write report files besides the terminal: `--json`, `--html` and `--sarif`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from emulate.errors import GpudistError, UsageError

if TYPE_CHECKING:
    from emulate.verify import Verdict

_FAILURE = "gpudist.failure/1"
_FAILURES = {2: "usage-error", 3: "failed", 4: "hung", 5: "unavailable", 70: "gpudist-error", 130: "interrupted"}
"""The word in place of a verdict, by exit code, where a command ends without one."""
_STANDARD_OUTPUT = "-"
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the verdict as JSON. - is standard output.")
]
ObjectOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write it as JSON. - is standard output.")
]
HtmlOption = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write the verdict as an HTML page. Needs the extra 'html'.")
]
SarifOption = Annotated[
    str | None,
    typer.Option("--sarif", metavar="FILE", help="Also write the findings as SARIF 2.1.0, for code hosts and editors."),
]


@dataclass(frozen=True)
class Outputs:
    """Describe where a report goes. `check` makes it.

    Attributes:
        json: The file of `--json`, or None.
        html: The file of `--html`, or None.
        screen: What is left for people: standard output, unless a file took it.
        sarif: The file of `--sarif`, or None.
        certificate: The file of `--certificate`, or None. It is written before the verdict.
    """

    json: Path | None
    html: Path | None
    screen: TextIO
    sarif: Path | None = None
    certificate: Path | None = None

    def write(self, verdict: Verdict) -> None:
        """Show a verdict, and write it to the files that were asked for."""
        from emulate.report import show, write_html, write_json, write_sarif

        show(verdict, self.screen)
        if self.html is not None:
            write_html(verdict, self.html)
        if self.sarif is not None:
            write_sarif(verdict, self.sarif)
        if self.json is not None:  # last: what fails before is written there instead
            write_json(verdict, self.json)


def check(
    json: str | None,
    html: str | None = None,
    others: Mapping[str, Path | None] | None = None,
    *,
    sarif: str | None = None,
    certificate: str | None = None,
) -> Outputs:
    """Find out before the work starts whether the files can be written, and what that would destroy.

    Args:
        json: What `--json` names, or None.
        html: What `--html` names, or None.
        others: What else the command reads or writes, by what it is: no report may lie there.
        sarif: What `--sarif` names, or None.
        certificate: What `--certificate` names, or None.

    Returns:
        Where the report goes.

    Raises:
        UsageError: When a file cannot be meant.
    """
    from emulate.report import check_libraries

    given = {"--json": json, "--html": html, "--sarif": sarif, "--certificate": certificate}
    named = {option: text for option, text in given.items() if text is not None}
    _check_apart(named)
    if html is not None:
        check_libraries()
    files = {option: _file(option, text, others or {}) for option, text in named.items()}
    screen = sys.stderr if _STANDARD_OUTPUT in named.values() else sys.stdout
    return Outputs(files.get("--json"), files.get("--html"), screen, files.get("--sarif"), files.get("--certificate"))


def write_failure(args: Sequence[str], message: str, exit_code: int) -> None:
    """Write what ended a command to the file of `--json`, so that its reader has an answer for every exit code.

    Args:
        args: The command line: the error may be one of its parser.
        message: What standard error says.
        exit_code: That of the command.
    """
    from emulate.report import write_object

    own = [*takewhile(lambda word: word != "--", args), ""]
    texts = [word[7:] or after for word, after in pairwise(own) if word.partition("=")[0] == "--json"]
    content = {"schema": _FAILURE, "verdict": _FAILURES[exit_code], "exit_code": exit_code, "message": message, "runs": []}
    for text in texts[-1:]:
        with contextlib.suppress(GpudistError):  # such a file is what is wrong, or belongs to somebody else
            write_object(content, _file("--json", text, {}))


def _check_apart(named: Mapping[str, str]) -> None:
    """See that no two options name one file."""
    taken: dict[str, str] = {}
    for option, text in named.items():
        other = taken.setdefault(_place(text), option)
        if other != option:
            raise UsageError(
                f"{other} and {option} must be files of their own. Received: {named[other]!r} for both. Name another for one."
            )


def _file(option: str, text: str, others: Mapping[str, Path | None]) -> Path:
    from emulate.report import STANDARD_OUTPUT, check_writable

    if text == _STANDARD_OUTPUT and option != "--certificate":
        return STANDARD_OUTPUT
    if text in ("", _STANDARD_OUTPUT):
        raise UsageError(f"{option} must name a file. Received: {option} {text!r}. Name one, or leave {option} out.")
    for what, other in others.items():
        if other is not None and _place(text) == os.path.realpath(other):
            raise UsageError(
                f"{option} must name a file of its own. Received: {option} {text!r}, which is {what}. Name another."
            )
    check_writable(Path(text), option)
    return Path(text)


def _place(text: str) -> str:
    return os.path.realpath("/dev/stdout" if text == _STANDARD_OUTPUT else text)
