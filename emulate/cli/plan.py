"""Define `gpudist plan`: forecast speed and price of a program on machines that are not here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emulate.cli import options
from emulate.cli.command import check_outputs, complain, exits_properly, program_args
from emulate.cli.options import option
from emulate.errors import Hung, ProgramFailed, UsageError
from emulate.program import shorten_traceback

if TYPE_CHECKING:
    from emulate.plan import Recorded
    from emulate.program import Program

EXAMPLES = """Examples:

gpudist plan train.py --on p4d.24xlarge

gpudist plan train.py --on p4d.24xlarge --memory 24GB

gpudist plan train.py --on dgx1-v100 --measured "1: 50 examples/s at batch 64"

gpudist plan train.py --on my_machine.toml --gpus 8,64 --html plan.html"""
_STEPS = 2


@exits_properly
def plan(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    on: Annotated[
        str | None,
        option("--on", "MACHINE", "Required. A machine of the catalogue, such as p4d.24xlarge, or your own TOML file."),
    ] = None,
    measured: Annotated[
        list[str], option("--measured", "TEXT", "What you measured: 'N: X examples/s at batch B'. Repeatable.")
    ] = [],  # noqa: B006 (typer copies it)
    gpus: Annotated[str | None, option("--gpus", "N,N", "Numbers of GPUs. Default: 1 to 100,000.")] = None,
    examples: Annotated[str, option("--examples", "N", "Examples in an epoch, for time and price.")] = "1000000",
    input_rate: Annotated[
        str | None, option("--input-rate", "TEXT", "What one host reads: 'X examples/s'. Default: what this machine reads.")
    ] = None,
    memory: Annotated[str | None, option("--memory", "SIZE", "Memory of one GPU: '24GB'. Default: the machine's.")] = None,
    batch: Annotated[str | None, option("--batch", "N", "Examples in a step, if gpudist cannot see them.")] = None,
    timeout: Annotated[str, option("--timeout", "S", "Time limit of the recorded run, in seconds.")] = options.DEFAULT_TIMEOUT,
    json: Annotated[str | None, option("--json", "FILE", "Also write the plan as JSON. - is standard output.")] = None,
    html: Annotated[
        str | None, option("--html", "FILE", "Also write the plan as an HTML page. Needs the extra 'html'.")
    ] = None,
) -> int:
    """Forecast how fast, and at what price, PROGRAM trains on 1 to 100,000 GPUs of a machine."""
    from emulate.plan import find_machine, machine_names, make_forecast, parse_measured, parse_memory, parse_rate
    from emulate.program import Program
    from emulate.report import show_plan, write_object, write_plan_html

    if on is None:
        raise UsageError(
            "--on must name a machine. Received: none. Example: gpudist plan train.py --on p4d.24xlarge. "
            f"Machines: {', '.join(machine_names())}."
        )
    machine, points = find_machine(on), parse_measured(measured)
    counts = None if gpus is None else [_count("--gpus", text) for text in gpus.split(",")]
    number = _count("--examples", examples)
    rate = None if input_rate is None else parse_rate(input_rate)
    room = None if memory is None else parse_memory(memory)
    own_batch = None if batch is None else _count("--batch", batch)
    seconds = options.number_of_seconds(timeout)
    user_program = Program.find(options.program_target(program, module), program_args(context))
    files = check_outputs(json, html, {"the program itself": user_program.file})
    recorded = _record(user_program, seconds, own_batch)
    forecast = make_forecast(recorded, machine, points, counts=counts, examples=number, input_per_second=rate, memory=room)
    show_plan(forecast, files.screen)
    if files.json is not None:
        write_object(forecast.to_json(), files.json)
    if files.html is not None:
        write_plan_html(forecast, files.html)
    return 0


def _count(option: str, text: str) -> int:
    """Return a positive whole number. Raise UsageError for another text."""
    if text.strip().isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"{option} must be a positive whole number. Received: {option} {text!r}. Example: {option} 64.")


def _record(program: Program, seconds: float, batch: int | None) -> Recorded:
    """Run a program for a few steps on one device and read what it recorded."""
    from emulate.plan import check_all_reduce, read_recorded
    from emulate.report import progress_on
    from emulate.verify.api import record

    with tempfile.TemporaryDirectory(prefix="gpudist-plan-") as folder, progress_on() as progress:
        operations = Path(folder) / "operations" / "operations.json"
        operations.parent.mkdir()
        result, notes = record(program, Path(folder), operations, steps=_STEPS, timeout=seconds, progress=progress)
        for note in (*program.notes, *notes):
            complain(note)
        check_all_reduce(program.name, result.trace, result.failure)
        if result.status == "hung":
            text = f"{program.name} did not make {_STEPS} steps in {seconds:g} s. Give it more time with --timeout."
            raise Hung(text, reason="timeout", stacks={})
        if result.status != "ok" or result.trace is None:
            text = shorten_traceback(result.failure or "")
            raise ProgramFailed(f"{program.name} fails on one device:\n{text}", host=0, traceback_text=text)
        return read_recorded(result.trace, operations, batch=batch)
