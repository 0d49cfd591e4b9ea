"""`gpudist devices`: what this machine has, and what can be emulated on it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from emulate.cli.command import exits_properly
from emulate.report import Page, width_of

EXAMPLES = """Example:

gpudist devices"""


@exits_properly
def devices() -> int:
    """What this machine has, and what can be emulated on it."""
    from emulate.devices import describe_machine

    page = Page(width_of(sys.stdout))
    _add(page, describe_machine(), 0)
    page.print()
    return 0


def _add(page: Page, about: Mapping[str, Any], indent: int) -> None:
    column = indent + max((len(str(key)) for key in about), default=0) + 2
    for key, value in about.items():
        label = str(key).replace("_", " ")
        if isinstance(value, Mapping):
            page.line(" " * indent, (label, "bold"))
            _add(page, value, indent + 2)
        else:
            page.labelled(label, _text(value), indent, column, label_style="bold")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)
