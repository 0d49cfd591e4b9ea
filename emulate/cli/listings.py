"""Define the commands that show what there is: `gpudist devices`, `gpudist causes` and `gpudist faults`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import ObjectOption, check_outputs, exits_properly
from emulate.faults import EXAMPLES as FAULTS
from emulate.faults import KINDS, PHASES
from emulate.report import Page, width_of, write_object

if TYPE_CHECKING:
    from emulate.verify.causes import Cause

DEVICES_EXAMPLES = """Examples:

gpudist devices

gpudist devices --json machine.json"""


@exits_properly
def devices(json: ObjectOption = None) -> int:
    """Show the GPUs of this machine, the topologies that it can run or emulate, and how it isolates hosts."""
    from emulate.cluster import describe_isolation
    from emulate.devices import describe_machine

    files = check_outputs(json)
    description = {**describe_machine(), **describe_isolation()}
    page = Page(width_of(files.screen))
    _add_devices(page, description, 0)
    page.print(files.screen)
    if files.json is not None:
        write_object({"schema": "gpudist.devices/1", **description}, files.json)
    return 0


def _add_devices(page: Page, description: Mapping[str, Any], indent: int) -> None:
    column = indent + max((len(_label(key)) for key in description), default=0) + 2
    for key, value in description.items():
        if value is None and f"{key}_error" in description:
            continue
        text, below = _split(key, value)
        if text:
            page.labelled(_label(key), text, indent, column, label_style="bold")
        else:
            page.line(" " * indent, (_label(key), "bold"))
        _add_devices(page, below, indent + 2)


def _split(key: str, value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return what stands beside a label, and what stands below it."""
    if isinstance(value, Mapping) and key.endswith("_bytes"):
        return ", ".join(f"{int(size) / 2**30:.1f} GiB {name}" for name, size in value.items()), {}
    if isinstance(value, Mapping) and "available" in value:
        more = {name: part for name, part in value.items() if name not in ("available", "why")}
        return "yes" if value["available"] else f"no: {value['why']}", more
    if isinstance(value, Mapping):
        return ("", value) if value else ("none", {})
    if isinstance(value, (list, tuple)):
        numbered = {
            str(number): ", ".join(f"{_label(name)} {_split(name, below)[0]}" for name, below in part.items())
            for number, part in enumerate(value)
            if isinstance(part, Mapping)
        }
        return ("", numbered) if numbered else (", ".join(map(str, value)) or "none", {})
    return "unknown" if value is None else str(value), {}


_LABELS = {"own_network": "private network", "copy_on_write": "private files", "faults_of_links": "network faults"}


def _label(key: str) -> str:
    return _LABELS.get(key) or key.removesuffix("_bytes").replace("_", " ")


CAUSES_EXAMPLES = """Examples:

gpudist causes

gpudist causes loss-scaling --json cause.json"""


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
    json: ObjectOption = None,
) -> int:
    """Explain a cause: its meaning, wrong and right code, its evidence and its fix."""
    from emulate.verify.causes import all_causes, get

    files, catalogue = check_outputs(json), all_causes()
    page = Page(width_of(files.screen))
    if code is None:
        column = max(len(cause.code) for cause in catalogue) + 2
        for cause in catalogue:
            page.labelled(cause.code, cause.text.title + _kind(cause), 0, column, label_style="bold")
    else:
        catalogue = (get(options.known_code(code, [cause.code for cause in catalogue], "CODE")),)
        _add_cause(page, catalogue[0])
    page.print(files.screen)
    if files.json is not None:
        flags = ("code", "by_design", "advice", "url")
        objects = [{**{name: getattr(cause, name) for name in flags}, **asdict(cause.text)} for cause in catalogue]
        write_object({"schema": "gpudist.causes/1", "causes": objects}, files.json)
    return 0


def _add_cause(page: Page, cause: Cause) -> None:
    from emulate.verify.causes.cause import EDIT, EVIDENCE, FIX, LINKS, RIGHT, WRONG, plain_text

    text = cause.text
    page.line((cause.code, "bold"), f"  {text.title}", (_kind(cause), "yellow"))
    page.blank()
    page.text(plain_text(text.meaning), indent=2)
    for title, code, style in ((WRONG, text.wrong, "red"), (RIGHT, text.right, "green")):
        if code:
            page.blank()
            page.line((title, f"bold {style}"))
            page.verbatim(code, indent=4)
    edit = [(EDIT, text.edit)] if text.edit else []
    for title, markdown in ((EVIDENCE, text.evidence), *((heading or FIX, fix) for heading, fix in text.fixes.items()), *edit):
        page.blank()
        page.line((title, "bold"))
        page.text(plain_text(markdown), indent=2)
    page.blank()
    page.line((LINKS, "bold"))
    page.text(plain_text(text.links), indent=2)
    page.line("  ", cause.url)


def _kind(cause: Cause) -> str:
    return " (advice)" if cause.advice else " (by design)" if cause.by_design else ""


FAULTS_EXAMPLES = """Examples:

gpudist faults"""


@exits_properly
def faults() -> int:
    """List the faults for `--fault`, and their syntax."""
    width = max(len(example) for example in FAULTS.values())
    for kind, fault in KINDS.items():
        print(f"{FAULTS[kind]:{width}}  {fault.meaning}")
    print(f"\nphases of a step: {', '.join(PHASES)} (default: input). Steps count from 1.")
    return 0
