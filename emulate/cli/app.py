"""Define the command `gpudist`, and handle Ctrl-C pressed twice, or held down."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from emulate.cli import demo, fix, launch, listings, plan, run, verify
from emulate.cli.command import OWN_FAULT, Command, ProgramCommand, complain, in_our_words, is_usage_error, write_failure
from emulate.errors import GpudistError, Interrupted, Unavailable, UsageError, did_you_mean

_OPTIONS_ABOVE = {"version": "Did you mean '--version'?", "help": "Did you mean '--help'?"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Commands(TyperGroup):
    """Resolve commands, and print usage errors in the form of all of gpudist's errors."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the user means. Raise UsageError if there is none."""
        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        hint = _OPTIONS_ABOVE.get(args[0]) or did_you_mean(args[0], self.commands) or f"Commands: {', '.join(self.commands)}."
        raise UsageError(f"A command of gpudist must exist. Received: {args[0]!r}. {hint}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its whole help; the parser would cut it to one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join((command.help or "").split())) for name, command in self.commands.items()])

    def main(self, *given: Any, **extra: Any) -> Any:
        """Run the command line and leave with its exit code."""
        args: Sequence[str] | None = given[0] if given else extra.get("args")
        try:
            code = super().main(*given, **{**extra, "standalone_mode": False})
        except GpudistError as error:
            code = _fail(args, str(error), error.exit_code)
        except Exception as error:
            if not is_usage_error(error):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                print(error)
            else:
                _fail(args, in_our_words(error), UsageError.exit_code)
            code = UsageError.exit_code
        sys.exit(code if isinstance(code, int) else 0)


def _fail(args: Sequence[str] | None, message: str, exit_code: int) -> int:
    """Print what ended the command, and write it where `--json` says."""
    complain(message)
    write_failure(sys.argv[1:] if args is None else args, message, exit_code)
    return exit_code


app = typer.Typer(
    name="gpudist",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its table cuts words and values at 80 columns
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example:\n\ngpudist verify train.py --topology 1x4 --topology 2x2",
)
app.command(cls=ProgramCommand, epilog=verify.EXAMPLES, no_args_is_help=True)(verify.verify)
app.command(cls=ProgramCommand, epilog=fix.EXAMPLES, no_args_is_help=True)(fix.fix)
app.command(cls=ProgramCommand, epilog=run.EXAMPLES, no_args_is_help=True)(run.run)
app.command(cls=ProgramCommand, epilog=plan.EXAMPLES, no_args_is_help=True)(plan.plan)
app.command(cls=ProgramCommand, epilog=launch.EXAMPLES, no_args_is_help=True)(launch.launch)
app.command(cls=Command, epilog=verify.COMPARE_EXAMPLES, no_args_is_help=True)(verify.compare)
app.command(cls=Command, epilog=listings.DEVICES_EXAMPLES)(listings.devices)
app.command(cls=Command, epilog=listings.CAUSES_EXAMPLES)(listings.causes)
app.command(cls=Command, epilog=listings.FAULTS_EXAMPLES)(listings.faults)
app.command(cls=Command, epilog=demo.EXAMPLES)(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        from gpudist_core.installed import own_version

        print(f"gpudist {own_version()}")
        raise typer.Exit


@app.callback()
def gpudist(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Check on this machine whether a TensorFlow program trains the same model on many devices as on one."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command as `emulate.cli.main` does."""
    if args is None:
        # A stream that is closed (`gpudist ... >&-`) becomes the null device: no opened file must get its number.
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        # No program may import from the folder of our own script.
        ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        if sys.path and not getattr(sys.flags, "safe_path", False) and os.path.abspath(sys.path[0]) != ours:
            del sys.path[0]
        _hear_one_at_a_time()
    try:
        code = _run(args)
        if args is None and code == Interrupted.exit_code:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter waits for threads, and ends hosts
        sys.stdout.flush()
    except BrokenPipeError:  # `gpudist ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except OSError as error:  # `gpudist ... > /dev/full`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        where = error.filename or "standard output, or a file"
        text = f"gpudist needs space for its output. Received: {where} ({error.strerror}). Free some, or use another disk."
        try:
            complain(text)
        except OSError:  # standard error lies on the same disk, and Python would end with 120 for what it still has for it
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return Unavailable.exit_code
    return code


def _run(args: Sequence[str] | None) -> int:
    try:
        app(args=None if args is None else list(args), prog_name="gpudist")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
            text = (
                "The temporary folder must exist and be writable. "
                f"Received: TMPDIR={os.environ.get('TMPDIR')!r} ({error.strerror}). Set TMPDIR to another folder."
            )
            return _fail(args, text, Unavailable.exit_code)
        return _own_fault(args)
    return 0


def _own_fault(args: Sequence[str] | None) -> int:
    text = traceback.format_exc()
    if os.environ.get("GPUDIST_DEBUG"):
        print(text, file=sys.stderr)
        where = "is above"
    else:
        with tempfile.NamedTemporaryFile("w", prefix="gpudist-fault-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(f"{sys.argv}\n{text}")
        where = f"is in {file.name} (GPUDIST_DEBUG=1 prints it here)"
    last = text.rstrip().splitlines()[-1]
    message = f"This is an error of gpudist, not of your program: {last}\nPlease report it with the traceback, which {where}."
    return _fail(args, message, OWN_FAULT)


_CLEANING_UP = 3.0
"""Seconds after a Ctrl-C in which another one is the same: longer than hosts take to end, shorter than anybody's patience."""


def _hear_one_at_a_time() -> None:
    """Raise KeyboardInterrupt for the first Ctrl-C of several; nothing is changed where Ctrl-C is ignored (`nohup`)."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    heard = float("-inf")

    def interrupt(_: int, __: Any) -> None:
        nonlocal heard
        before, heard = heard, time.monotonic()
        if heard - before > _CLEANING_UP:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
