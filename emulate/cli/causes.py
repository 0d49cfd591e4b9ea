"""`gpudist causes`: the catalogue of what can be wrong."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import exits_properly
from emulate.report import Page, width_of

EXAMPLES = """Examples:

gpudist causes

gpudist causes loss-scaling"""


@exits_properly
def causes(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="One cause; all of them unless told.", show_default=False)
    ] = None,
) -> int:
    """What a verdict's causes mean, how they are found, how to mend them."""
    from emulate.verify.causes import all_causes, get

    page = Page(width_of(sys.stdout))
    known = list(all_causes())
    if code is None:
        _add_all(page, known)
    else:
        _add_one(page, get(options.known_code(code, [cause.code for cause in known], "CODE")))
    page.print()
    return 0


def _add_all(page: Page, known: list[Any]) -> None:
    column = max(len(cause.code) for cause in known) + 2
    for cause in known:
        page.labelled(cause.code, cause.title + _kind(cause), 0, column, label_style="bold")


def _add_one(page: Page, cause: Any) -> None:
    page.line((cause.code, "bold"), f"  {cause.title}", (_kind(cause), "yellow"))
    for title, text in (("Meaning", cause.meaning), ("Evidence", cause.evidence), ("Fix", cause.fix)):
        page.blank()
        page.line((title, "bold"))
        page.text(text, indent=2)


def _kind(cause: Any) -> str:
    return " (advice)" if cause.advice else " (by design)" if cause.by_design else ""
