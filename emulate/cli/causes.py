"""Define `gpudist causes`: the catalogue of causes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import exits_properly
from emulate.report import STANDARD_OUTPUT, Page, width_of, write_object

if TYPE_CHECKING:
    from emulate.verify.causes import Cause

EXAMPLES = """Examples:

gpudist causes

gpudist causes loss-scaling

gpudist causes loss-scaling --json"""


@exits_properly
def causes(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            autocompletion=options.complete_code,
            help="The code of a cause. Default: list all causes.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all texts in Markdown.")] = False,
) -> int:
    """Explain a cause: its meaning, wrong and right code, its evidence and its fix."""
    from emulate.verify.causes import all_causes, get

    page = Page(width_of(sys.stdout))
    catalogue = all_causes()
    asked = None if code is None else get(options.known_code(code, [cause.code for cause in catalogue], "CODE"))
    if json:
        write_object(_described(asked) if asked else {"causes": [_described(cause) for cause in catalogue]}, STANDARD_OUTPUT)
        return 0
    if asked is None:
        _add_all(page, catalogue)
    else:
        _add_one(page, asked)
    page.print()
    return 0


def _described(cause: Cause) -> dict[str, Any]:
    """Return a cause as a JSON object: the fixes by the heading that says when they suit, the general one under ''."""
    about = {"code": cause.code, "by_design": cause.by_design, "advice": cause.advice, "url": cause.url}
    return about | asdict(cause.text)


def _add_all(page: Page, catalogue: tuple[Cause, ...]) -> None:
    column = max(len(cause.code) for cause in catalogue) + 2
    for cause in catalogue:
        page.labelled(cause.code, cause.text.title + _kind(cause), 0, column, label_style="bold")


def _add_one(page: Page, cause: Cause) -> None:
    from emulate.verify.causes.text import EVIDENCE, FIX, LINKS, RIGHT, WRONG, plain

    text = cause.text
    page.line((cause.code, "bold"), f"  {text.title}", (_kind(cause), "yellow"))
    page.blank()
    page.text(plain(text.meaning), indent=2)
    for title, code, style in ((WRONG, text.wrong, "red"), (RIGHT, text.right, "green")):
        if code:
            page.blank()
            page.line((title, f"bold {style}"))
            page.verbatim(code, indent=4)
    for title, markdown in ((EVIDENCE, text.evidence), *((heading or FIX, fix) for heading, fix in text.fixes.items())):
        page.blank()
        page.line((title, "bold"))
        page.text(plain(markdown), indent=2)
    page.blank()
    page.line((LINKS, "bold"))
    page.text(plain(text.links), indent=2)
    page.line("  ", cause.url)


def _kind(cause: Cause) -> str:
    return " (advice)" if cause.advice else " (by design)" if cause.by_design else ""
