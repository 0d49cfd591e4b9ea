"""Share what every command needs: `--` before the program's arguments, and exit codes for errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from emulate.cli.usage import HINT, Command
from emulate.errors import Interrupted

OWN_FAULT = 70
_ARGS = "gpudist.args"
P = ParamSpec("P")


class ProgramCommand(Command):
    """Parse a command line that ends in `[-- ARGS...]`: everything after the first `--` goes to the program unchanged."""

    hint = HINT

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the program's arguments aside before the options are read."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


def program_args(context: typer.Context) -> tuple[str, ...]:
    """Return the program's own arguments of a `ProgramCommand`."""
    args: tuple[str, ...] = context.meta.get(_ARGS, ())
    return args


def exits_properly(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's return value into its exit code, and Ctrl-C into an error."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            raise typer.Exit(command(*args, **kwargs))
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    return wrapped


def complain(text: str) -> None:
    """Print one message on standard error: wrapped for a terminal, one line for a log, where it is searched."""
    from emulate.report import Page, width_of

    page = Page(width_of(sys.stderr) if sys.stderr.isatty() else sys.maxsize)
    page.labelled("gpudist:", text, 0, 9, label_style="bold red")
    page.print(sys.stderr)
