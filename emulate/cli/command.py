"""Share what every command needs: report files, usage errors in gpudist's form, arguments after `--`, and exit codes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO

import typer
from typer.core import TyperCommand

from emulate.cli.options import option
from emulate.errors import GpudistError, Interrupted, UsageError, did_you_mean

if TYPE_CHECKING:
    from emulate.verify import Verdict

_FAILURES = {2: "usage-error", 3: "failed", 4: "hung", 5: "unavailable", 70: "gpudist-error", 130: "interrupted"}
"""The word in place of a verdict, by exit code, where a command ends without one."""
_STANDARD_OUTPUT = "-"
JsonOption = Annotated[str | None, option("--json", "FILE", "Also write the verdict as JSON. - is standard output.")]
ObjectOption = Annotated[str | None, option("--json", "FILE", "Also write it as JSON. - is standard output.")]
HtmlOption = Annotated[str | None, option("--html", "FILE", "Also write the verdict as an HTML page. Needs the extra 'html'.")]


@dataclass(frozen=True)
class Outputs:
    """Describe where a report goes. `check_outputs` makes it.

    Attributes:
        json: The file of `--json`, or None.
        html: The file of `--html`, or None.
        screen: What is left for people: standard output, unless a file took it.
        sarif: The file of `--sarif`, or None.
        certificate: The file of `--certificate`, or None. It is written before the verdict.
    """

    json: Path | None
    html: Path | None
    screen: TextIO
    sarif: Path | None = None
    certificate: Path | None = None

    def write(self, verdict: Verdict) -> None:
        """Show a verdict, and write it to the files that were asked for."""
        from emulate.report import show, write_html, write_json, write_sarif

        show(verdict, self.screen)
        if self.html is not None:
            write_html(verdict, self.html)
        if self.sarif is not None:
            write_sarif(verdict, self.sarif)
        if self.json is not None:  # last: what fails before is written there instead
            write_json(verdict, self.json)


def check_outputs(
    json: str | None,
    html: str | None = None,
    others: Mapping[str, Path | None] | None = None,
    *,
    sarif: str | None = None,
    certificate: str | None = None,
) -> Outputs:
    """Find out before the work starts whether the files can be written, and what that would destroy.

    Args:
        json: What `--json` names, or None.
        html: What `--html` names, or None.
        others: What else the command reads or writes, by what it is: no report may lie there.
        sarif: What `--sarif` names, or None.
        certificate: What `--certificate` names, or None.

    Returns:
        Where the report goes.

    Raises:
        UsageError: When a file cannot be meant.
    """
    from emulate.report import check_libraries

    given = {"--json": json, "--html": html, "--sarif": sarif, "--certificate": certificate}
    named = {name: text for name, text in given.items() if text is not None}
    taken: dict[str, str] = {}
    for name, text in named.items():
        other = taken.setdefault(_real_path(text), name)
        if other != name:
            raise UsageError(
                f"{other} and {name} must be files of their own. Received: {named[other]!r} for both. Name another for one."
            )
    if html is not None:
        check_libraries()
    files = {name: _output_file(name, text, others or {}) for name, text in named.items()}
    screen = sys.stderr if _STANDARD_OUTPUT in named.values() else sys.stdout
    return Outputs(files.get("--json"), files.get("--html"), screen, files.get("--sarif"), files.get("--certificate"))


def write_failure(args: Sequence[str], message: str, exit_code: int) -> None:
    """Write what ended a command to the file of `--json`, so that its reader has an answer for every exit code.

    Args:
        args: The command line: the error may be one of its parser.
        message: What standard error says.
        exit_code: That of the command.
    """
    from emulate.report import write_object

    own = [*takewhile(lambda word: word != "--", args), ""]
    texts = [word[7:] or after for word, after in pairwise(own) if word.partition("=")[0] == "--json"]
    content = {"schema": "gpudist.failure/1", "verdict": _FAILURES[exit_code], "exit_code": exit_code, "message": message}
    for text in texts[-1:]:
        with contextlib.suppress(GpudistError):  # such a file is what is wrong, or belongs to somebody else
            write_object({**content, "runs": []}, _output_file("--json", text, {}))


def _output_file(name: str, text: str, others: Mapping[str, Path | None]) -> Path:
    from emulate.report import STANDARD_OUTPUT, check_writable

    if text == _STANDARD_OUTPUT and name != "--certificate":
        return STANDARD_OUTPUT
    if text in ("", _STANDARD_OUTPUT):
        raise UsageError(f"{name} must name a file. Received: {name} {text!r}. Name one, or leave {name} out.")
    for what, other in others.items():
        if other is not None and _real_path(text) == os.path.realpath(other):
            raise UsageError(f"{name} must name a file of its own. Received: {name} {text!r}, which is {what}. Name another.")
    check_writable(Path(text), name)
    return Path(text)


def _real_path(text: str) -> str:
    return os.path.realpath("/dev/stdout" if text == _STANDARD_OUTPUT else text)


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
            takes = " ".join(_name_of_value(param) for param in self.params if param.param_type_name == "argument")
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
    options = [] if name is None or context is None else [param for param in context.command.params if name in param.opts]
    for param in options:
        if not getattr(param, "is_flag", False):
            return f"{name} must have a value. Received: none. Write {name} {_name_of_value(param)}."
    if type(error).__name__ == "MissingParameter":
        return f"{path} needs {_name_of_value(error.param)}. Received: none. '{path} --help' shows how it is used."
    return f"{str(error.format_message()).rstrip('.')}. '{path} --help' shows how it is used."


def _name_of_value(param: Any) -> str:
    """Return what the help calls the value of a parameter."""
    return str(param.metavar or param.name.upper())


OWN_FAULT = 70
_ARGS = "gpudist.args"
P = ParamSpec("P")


class ProgramCommand(Command):
    """Parse a command line that ends in `[-- ARGS...]`: everything after the first `--` goes to the program unchanged."""

    hint = "Options and arguments of the program itself go after '--'."

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
