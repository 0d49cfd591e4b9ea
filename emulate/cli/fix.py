"""Define `gpudist fix`: edits of the program that gpudist has verified."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from emulate.cli import options
from emulate.cli.command import ObjectOption, check_outputs, complain, exits_properly, program_args
from emulate.cli.options import flag, option
from emulate.errors import UsageError

if TYPE_CHECKING:
    from emulate.fix import FixReport

EXAMPLES = """Examples:

gpudist fix train.py --topology 1x4

gpudist fix train.py --topology 1x4 --write

gpudist fix train.py --with core --patch fix.diff --json fix.json"""
_FORMS = ("core", "plain")


@exits_properly
def fix(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    topology: Annotated[
        list[str], options.topology_option("Number of hosts x devices on each host. Repeatable. Default: 1x4.")
    ] = [],  # noqa: B006 (typer copies it)
    write: Annotated[
        bool, flag("--write", "Write proven edits to the program's files. A copy stays beside each: train.py.orig.")
    ] = False,
    patch: Annotated[Path | None, option("--patch", "FILE", "Write the proven edits to this file, as a unified diff.")] = None,
    json: ObjectOption = None,
    form: Annotated[
        str | None,
        options.choice(
            "--with", _FORMS, "Use only edits with gpudist_core, or only with plain TensorFlow. Default: plain ones first."
        ),
    ] = None,
    steps: Annotated[
        str, option("--steps", "N|all|auto", "Training steps to compare, as in gpudist verify.")
    ] = options.DEFAULT_STEPS,
    timeout: options.TimeoutOption = options.DEFAULT_TIMEOUT,
    allow: options.AllowOption = [],  # noqa: B006
) -> int:
    """Edit PROGRAM so that it trains the same model as on one device, and prove each edit by a verification."""
    from emulate.program import Program
    from emulate.report import progress_on, show

    check_libcst()
    if form is not None and form not in _FORMS:
        raise UsageError(f"--with must be core or plain. Received: --with {form!r}.")
    chosen, _ = options.fill_from_file(context, topology=topology, steps=steps, allow=allow, timeout=timeout)
    wanted = options.topologies(chosen["topology"])
    count, seconds = options.number_of_steps(chosen["steps"]), options.number_of_seconds(chosen["timeout"])
    user_program = Program.find(options.program_target(program, module), program_args(context))
    files = check_outputs(json, None, {"the program itself": user_program.file, "the file of --patch": patch})
    options.check_codes(chosen["allow"])
    _check_patch(patch)
    from emulate.fix import check_editable, write_edits
    from emulate.fix import fix as fix_program

    if write and user_program.file is not None:
        check_editable(user_program.file)
    with progress_on() as progress:
        report = fix_program(
            user_program,
            wanted,
            form=form,
            tell=tell_of_try,
            steps=count,
            timeout=seconds,
            allow=tuple(chosen["allow"]),
            progress=progress,
        )
    show(report.before, files.screen)
    show_edits(report, files.screen)
    is_proven = bool(report.fixes) and report.after.is_equivalent
    if patch is not None and is_proven:
        patch.write_text(report.patch, encoding="utf-8", errors="surrogateescape", newline="")
    if write and is_proven:
        for backup in write_edits(report.files):
            print(f"Written. The file as it was: {backup}", file=files.screen)
    if files.json is not None:
        from emulate.report import write_object

        write_object(report.to_json(), files.json)
    return report.exit_code


def tell_of_try(what: str) -> None:
    """Say on standard error what is verified now."""
    complain(f"verifying {what}")


def check_libcst() -> None:
    """Raise UsageError where the library that edits is not installed."""
    if importlib.util.find_spec("libcst") is None:
        raise UsageError('gpudist fix needs LibCST. Received: libcst not installed. Install it: pip install "gpudist[fix]".')


def _check_patch(patch: Path | None) -> None:
    """Raise UsageError where a diff cannot be written, or would replace something else."""
    if patch is None:
        return
    received = f"Received: --patch {str(patch)!r}"
    if patch.exists() and not patch.read_bytes().startswith((b"--- a/",)) and patch.stat().st_size:
        raise UsageError(f"--patch must name a new file, or an earlier patch. {received}, which is neither. Name another.")
    if not patch.absolute().parent.is_dir():
        raise UsageError(f"--patch must name a file in a folder that exists. {received}. Name another.")


def show_edits(report: FixReport, screen: TextIO) -> None:
    """Print the edits, the diff of all of them, and whether it is proven."""
    if not report.fixes and report.after.is_equivalent:
        print("\nNothing to fix: gpudist made no edit.", file=screen)
        return
    for number, one in enumerate(report.fixes, 1):
        print(f"\nEdit {number}: {one.code}, {one.place}\n{one.words}", file=screen)
    if report.fixes:
        print(f"\n{report.patch}", file=screen)
        print(_sentence(report), file=screen)
    for why in report.not_fixed:
        print(f"\n{why}", file=screen)


def _sentence(report: FixReport) -> str:
    """Say what the verifications have shown."""
    verdicts = ", ".join(f"{run.topology} {run.verdict}" for run in report.after.runs)
    count = f"{report.verifications} verifications"
    if report.after.is_equivalent:
        was = ", ".join(f"{run.topology} {run.verdict}" for run in report.before.runs)
        now = "has a seed, too" if report.before.reference.status == "ok" else "trains, too"
        order = ", but for the order of its examples (compared without shuffling)" if report.reorders else ""
        of_one = f"One device now {now}." if report.changes_one_device else f"One device trains as before{order}."
        return f"Proven: {verdicts} with this edit (before: {was}). {of_one} {count}."
    return f"Not enough: {verdicts} with this edit, which removes what it names. {count}."
