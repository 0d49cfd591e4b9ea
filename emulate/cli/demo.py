"""`gpudist demo`: verify a correct program and a wrong one, as a first look at what gpudist does."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emulate.cli.command import OWN_FAULT, complain, exits_properly
from emulate.cli.fix import show_edits
from emulate.cli.options import option
from emulate.errors import UsageError
from emulate.examples import FOLDERS, examples_folder

if TYPE_CHECKING:
    from emulate.verify import Verdict

EXAMPLES = """Examples:

gpudist demo

gpudist demo --copy examples"""
_RIGHT = "programs/multiworker_loop.py"
_WRONG = "bugs/loss_scaling_multiworker.py"
_CAUSE = "loss-scaling"
_TOPOLOGIES = ("1x4", "2x2")


@exits_properly
def demo(
    copy: Annotated[
        Path | None, option("--copy", "DIR", "Copy the example programs and their data to this new folder, and stop.")
    ] = None,
) -> int:
    """Verify a correct and a wrong program on emulated GPUs. This takes about a minute and needs no GPU."""
    return _copy(copy) if copy is not None else _show()


def _copy(folder: Path) -> int:
    received = f"Received: --copy {str(folder)!r}"
    try:
        folder.mkdir(parents=True)
        for name in FOLDERS:
            shutil.copytree(examples_folder() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise UsageError(f"--copy must name a new folder. {received}, which exists. Name another folder.") from None
    except OSError as error:
        raise UsageError(f"--copy must name a folder that can be written. {received} ({error.strerror or error}).") from None
    print(f"Copied the examples to {folder}. Try:\n  {_command(folder / _WRONG)}")
    return 0


def _show() -> int:
    from emulate.devices import check_tensorflow

    check_tensorflow()
    folder, here = examples_folder(), Path.cwd()
    folder = folder.relative_to(here) if folder.is_relative_to(here) else folder  # as a user would type it
    right, wrong = folder / _RIGHT, folder / _WRONG
    print(
        "gpudist runs a training program on several emulated GPUs and compares it, step\n"
        "by step, with the same program on one device. It needs no GPU.\n"
        "\n1. A correct program: it learns handwritten digits on several hosts.\n"
    )
    if code := _verify(right, 0):
        return code
    print(
        "\nThe topology 1x4 is 1 host with 4 devices, 2x2 is 2 hosts with 2 devices each.\n"
        '"equivalent" means: the program trains the same model there as on one device.\n'
        "Data, gradients, weights and losses agree, except for rounding.\n"
        f"\n2. The same program with a mistake in one line.\n\n{_difference(right, wrong)}\n"
    )
    if code := _fix(wrong) if importlib.util.find_spec("libcst") else _verify(wrong, 1):
        return code
    print(
        f"\ngpudist found the mistake, {_CAUSE}, and printed the fix.\n\n"
        f"Now verify your own program. You do not need to change it:\n  {_command('train.py')}\n\n"
        "More\n"
        "  gpudist fix train.py --write  edits your program and proves it: pip install gpudist[fix]\n"
        "  gpudist demo --copy examples  copies the example programs to a new folder\n"
        "  gpudist causes                lists the causes that gpudist knows\n"
        "  https://gpudist.readthedocs.io"
    )
    return 0


def _command(program: str | Path) -> str:
    return " ".join(["gpudist verify", shlex.quote(str(program)), *(f"--topology {name}" for name in _TOPOLOGIES)])


def _verify(program: Path, expected: int) -> int:
    """Verify and print one program. Return 0 if the verdict is the expected one, else an exit code."""
    from emulate.report import progress_on, show
    from emulate.verify import verify

    print(f"$ {_command(program)}\n", flush=True)
    with progress_on() as progress:
        verdict = verify(program, _TOPOLOGIES, progress=progress)
    show(verdict)
    return _exit_code(verdict, expected)


def _fix(program: Path) -> int:
    """Verify the wrong program, and let gpudist edit and prove it. Return 0 if both go as expected, else an exit code."""
    from emulate.fix import fix
    from emulate.program import Program
    from emulate.report import progress_on, show

    print(f"$ {_command(program)} --fix\n", flush=True)
    with progress_on() as progress:
        report = fix(Program.find(str(program)), _TOPOLOGIES, progress=progress)
    show(report.before)
    if code := _exit_code(report.before, 1):
        return code
    show_edits(report, sys.stdout)
    return _exit_code(report.after, 0)


def _exit_code(verdict: Verdict, expected: int) -> int:
    is_found = all(_CAUSE in [cause.code for cause in run.causes] for run in verdict.runs)
    if verdict.exit_code == expected and (expected == 0 or is_found):
        return 0
    complain(
        f"The demo must end with exit code {expected} for this program{f' and the cause {_CAUSE}' if expected else ''}. "
        f"Received: exit code {verdict.exit_code}. See the verdict above."
    )
    return OWN_FAULT if verdict.exit_code in (0, 1) else verdict.exit_code


def _difference(right: Path, wrong: Path) -> str:
    """Return the lines that the mistake changes, before and after."""
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (right, wrong))
    lines = []
    for kind, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal" and any("# BUG" in line for line in after[c:d]):
            lines += [f"   correct  {line.strip()}" for line in before[a:b]]
            lines += [f"   wrong    {line.partition('# BUG')[0].strip()}" for line in after[c:d]]
    return "\n".join(lines)
