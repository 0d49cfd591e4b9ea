"""Print usage errors of the command line's parser in the same form as all of gpudist's errors."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand

from emulate.errors import UsageError, did_you_mean

HINT = "Options and arguments of the program itself go after '--'."


class Command(TyperCommand):
    """Report an unexpected argument in gpudist's own words."""

    hint = ""
    """The text to add if an option or argument may belong to the program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; raise UsageError for arguments that the command does not take."""
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            if is_usage_error(error):  # of some of them the parser does not say in which command
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        if ctx.args and not ctx.resilient_parsing:
            takes = " ".join(_name(param) for param in self.params if param.param_type_name == "argument")
            raise UsageError(
                f"{ctx.command_path} takes {f'one {takes}' if takes else 'no arguments'}. "
                f"Received: {'also ' if takes else ''}{ctx.args[0]!r}. {self.hint}".rstrip()
            )
        return rest

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples line by line, as they are: a command that is wrapped cannot be copied."""
        formatter.write("\n" + textwrap.indent(self.epilog or "", "  ") + "\n")


def is_usage_error(error: BaseException) -> bool:
    """Return whether the parser raised it: typer's own copy of click, or click itself before typer 0.26."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def in_our_words(error: Any) -> str:
    """Return what must hold, what was received and what to do, of an error that the parser raised."""
    context = getattr(error, "ctx", None)
    path = "gpudist" if context is None else context.command_path
    name = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        hint = did_you_mean(str(name), error.possibilities or []) or f"'{path} --help' lists them."
        more = getattr(getattr(context, "command", None), "hint", "")
        return f"An option of {path} must exist. Received: {name}. {hint} {more}".rstrip()
    if name is not None and context is not None and (metavar := _metavar(context, name)):
        return f"{name} must have a value. Received: none. Write {name} {metavar}."
    if type(error).__name__ == "MissingParameter":
        return f"{path} needs {_name(error.param)}. Received: none. '{path} --help' shows how it is used."
    return f"{str(error.format_message()).rstrip('.')}. '{path} --help' shows how it is used."


def _metavar(context: Any, option: str) -> str:
    """Return what stands for the value of an option; empty where it takes none."""
    matching = [param for param in context.command.params if option in param.opts and not getattr(param, "is_flag", False)]
    return _name(matching[0]) if matching else ""


def _name(param: Any) -> str:
    """Return what the help calls the value of a parameter."""
    return str(param.metavar or param.name.upper())
