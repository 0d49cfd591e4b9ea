"""Define `gpudist devices`: show what this machine has, and what can run on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emulate.cli import outputs
from emulate.cli.command import exits_properly
from emulate.report import Page, width_of, write_object

EXAMPLES = """Examples:

gpudist devices

gpudist devices --json machine.json"""
_SCHEMA = "gpudist.devices/1"


@exits_properly
def devices(
    json: outputs.ObjectOption = None,
) -> int:
    """Show the GPUs of this machine, the topologies that it can run or emulate, and how it isolates hosts."""
    from emulate.cluster import describe_isolation
    from emulate.devices import describe_machine

    files = outputs.check(json)
    description = {**describe_machine(), **describe_isolation()}
    page = Page(width_of(files.screen))
    _add(page, description, 0)
    page.print(files.screen)
    if files.json is not None:
        write_object({"schema": _SCHEMA, **description}, files.json)
    return 0


def _add(page: Page, description: Mapping[str, Any], indent: int) -> None:
    column = indent + max((len(_label(key)) for key in description), default=0) + 2
    for key, value in description.items():
        if value is None and f"{key}_error" in description:
            continue
        text, below = _split(key, value)
        if text:
            page.labelled(_label(key), text, indent, column, label_style="bold")
        else:
            page.line(" " * indent, (_label(key), "bold"))
        _add(page, below, indent + 2)


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
        numbered = {str(number): _in_one_line(part) for number, part in enumerate(value) if isinstance(part, Mapping)}
        return ("", numbered) if numbered else (", ".join(map(str, value)) or "none", {})
    return "unknown" if value is None else str(value), {}


def _in_one_line(description: Mapping[str, Any]) -> str:
    return ", ".join(f"{_label(key)} {_split(key, value)[0]}" for key, value in description.items())


_LABELS = {"own_network": "private network", "copy_on_write": "private files", "faults_of_links": "network faults"}


def _label(key: str) -> str:
    return _LABELS.get(key) or key.removesuffix("_bytes").replace("_", " ")
