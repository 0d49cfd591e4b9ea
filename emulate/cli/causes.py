"""Define `gpudist causes`: the catalogue of causes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options, outputs
from emulate.cli.command import exits_properly
from emulate.report import Page, width_of, write_object

if TYPE_CHECKING:
    from emulate.verify.causes import Cause

EXAMPLES = """Examples:

gpudist causes

gpudist causes loss-scaling --json cause.json"""
_SCHEMA = "gpudist.causes/1"


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
    json: outputs.ObjectOption = None,
) -> int:
    """Explain a cause: its meaning, wrong and right code, its evidence and its fix."""
    from emulate.verify.causes import all_causes, get

    files, catalogue = outputs.check(json), all_causes()
    page = Page(width_of(files.screen))
    if code is None:
        _add_all(page, catalogue)
    else:
        catalogue = (get(options.known_code(code, [cause.code for cause in catalogue], "CODE")),)
        _add_one(page, catalogue[0])
    page.print(files.screen)
    if files.json is not None:
        write_object({"schema": _SCHEMA, "causes": [_as_json(cause) for cause in catalogue]}, files.json)
    return 0


def _as_json(cause: Cause) -> dict[str, Any]:
    return {"code": cause.code, "by_design": cause.by_design, "advice": cause.advice, "url": cause.url, **asdict(cause.text)}


def _add_all(page: Page, catalogue: tuple[Cause, ...]) -> None:
    column = max(len(cause.code) for cause in catalogue) + 2
    for cause in catalogue:
        page.labelled(cause.code, cause.text.title + _kind(cause), 0, column, label_style="bold")


def _add_one(page: Page, cause: Cause) -> None:
    from emulate.verify.causes.cause import EVIDENCE, FIX, LINKS, RIGHT, WRONG, plain_text

    text = cause.text
    page.line((cause.code, "bold"), f"  {text.title}", (_kind(cause), "yellow"))
    page.blank()
    page.text(plain_text(text.meaning), indent=2)
    for title, code, style in ((WRONG, text.wrong, "red"), (RIGHT, text.right, "green")):
        if code:
            page.blank()
            page.line((title, f"bold {style}"))
            page.verbatim(code, indent=4)
    for title, markdown in ((EVIDENCE, text.evidence), *((heading or FIX, fix) for heading, fix in text.fixes.items())):
        page.blank()
        page.line((title, "bold"))
        page.text(plain_text(markdown), indent=2)
    page.blank()
    page.line((LINKS, "bold"))
    page.text(plain_text(text.links), indent=2)
    page.line("  ", cause.url)


def _kind(cause: Cause) -> str:
    return " (advice)" if cause.advice else " (by design)" if cause.by_design else ""
