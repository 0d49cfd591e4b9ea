"""Directives that write the tables of commands, faults and pytest options from the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from emulate.cli.app import app
from emulate.faults import EXAMPLES, KINDS
from emulate.pytest_plugin.options import add_options


def _plain(text: str | None) -> str:
    """Return the text without the markup of rich."""
    return re.sub(r"\[/?[a-z ]+\]", "", text or "")


def _table(header: Iterable[str], rows: Iterable[tuple[str, str]]) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (35, 65)), cols=2)
    group += nodes.thead("", nodes.row("", *(nodes.entry("", nodes.paragraph(text=text)) for text in header)))
    body = nodes.tbody()
    for name, text in rows:
        cells = nodes.literal(text=name), nodes.inline(text=text)
        body += nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))
    group += body
    return nodes.table("", group, classes=["options"])


def _option(parameter: Any, context: Any) -> tuple[str, str]:
    name, text = parameter.get_help_record(context) or (parameter.make_metavar(context), getattr(parameter, "help", "") or "")
    return name, " ".join(_plain(text).split())


class Commands(Directive):
    """Write one section for each command of `gpudist`: its usage, what it does, its options, examples."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        group: Any = typer.main.get_command(app)
        context = group.make_context("gpudist", [], resilient_parsing=True)
        return [self._command(name, command, context) for name, command in group.commands.items() if not command.hidden]

    def _command(self, name: str, command: Any, parent: Any) -> nodes.section:
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        section = nodes.section("", nodes.title(text=f"gpudist {name}"), ids=[f"gpudist-{name}"], names=[f"gpudist {name}"])
        usage = " ".join(["gpudist", name, *command.collect_usage_pieces(context)])
        section += nodes.literal_block(usage, usage, language="text")
        section += nodes.paragraph(text=" ".join(_plain(command.help).split()))
        section += _table(("argument or option", "meaning"), (_option(one, context) for one in command.get_params(context)))
        if command.epilog:
            lines = [line for line in command.epilog.splitlines() if line.startswith("gpudist")]
            section += nodes.paragraph(text="Examples:")
            section += nodes.literal_block("\n".join(lines), "\n".join(lines), language="sh")
        return section


class PytestOptions(Directive):
    """Write the table of the plugin's options."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        parser = pytest.Parser(_ispytest=True)
        add_options(parser)
        options = parser.getgroup("gpudist").options
        rows = []
        for option in options:
            attributes = option.attrs()
            name = " ".join(filter(None, [option.names()[0], attributes.get("metavar")]))
            rows.append((name, attributes["help"].replace("%%", "%")))
        return [_table(("option", "meaning"), rows)]


class Faults(Directive):
    """Write the table of faults that `--fault` takes."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return [_table(("fault", "meaning"), ((EXAMPLES[kind], fault.meaning) for kind, fault in KINDS.items()))]


def setup(sphinx: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    sphinx.add_directive("gpudist-commands", Commands)
    sphinx.add_directive("gpudist-faults", Faults)
    sphinx.add_directive("gpudist-pytest-options", PytestOptions)
    return {"parallel_read_safe": True}
