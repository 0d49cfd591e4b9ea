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
    column = indent + max((len(_label(key)) for key in about), default=0) + 2
    for key, value in about.items():
        label = _label(key)
        if isinstance(value, Mapping) and "available" in value and "why" in value:
            page.labelled(label, "yes" if value["available"] else f"no: {value['why']}", indent, column, label_style="bold")
        elif isinstance(value, Mapping) and str(key).endswith("_bytes"):
            sizes = ", ".join(f"{int(size) / 2**30:.1f} GiB {name}" for name, size in value.items())
            page.labelled(label, sizes, indent, column, label_style="bold")
        elif isinstance(value, Mapping):
            page.line(" " * indent, (label, "bold"))
            _add(page, value, indent + 2)
        else:
            page.labelled(label, _text(value), indent, column, label_style="bold")


def _label(key: object) -> str:
    return str(key).removesuffix("_bytes").replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return "unknown" if value is None else str(value)
