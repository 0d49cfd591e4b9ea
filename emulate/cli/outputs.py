"""The files that a verdict is written to besides the terminal: `--json` and `--html`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from emulate.verify import Verdict

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the verdict to this file.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write it as a page with pictures; needs the extra: html."),
]


def check(json: Path | None, html: Path | None) -> None:
    """Find out before the work starts whether they can be written.

    Args:
        json: The file of `--json`, or None.
        html: The file of `--html`, or None.

    Raises:
        WrongUse: When one cannot.
    """
    from emulate.errors import WrongUse
    from emulate.report import check_libraries, check_writable

    if json is not None and html is not None and json.absolute() == html.absolute():
        raise WrongUse(f"--json and --html must be files of their own. Received: {str(json)!r} for both. Name another for one.")
    if html is not None:
        check_libraries()
    for option, path in (("--json", json), ("--html", html)):
        if path is not None:
            check_writable(path, option)


def write(verdict: Verdict, json: Path | None, html: Path | None) -> None:
    """Write the verdict to those that were asked for."""
    from emulate.report import write_html, write_json

    if json is not None:
        write_json(verdict, json)
    if html is not None:
        write_html(verdict, html)
