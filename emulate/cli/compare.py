"""`gpudist compare`: two recorded runs, also from other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emulate.cli.command import exits_properly
from emulate.errors import WrongUse

EXAMPLES = """Example:

gpudist verify train.py --topology 1x4 --traces here

gpudist compare here/1x4 there/1x4"""
_Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that --traces left.", show_default=False)]


@exits_properly
def compare(
    first: _Trace,
    second: _Trace,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the verdict to this file.")] = None,
) -> int:
    """Compare two recorded runs: the first against the second, which is the reference."""
    from emulate.report import check_writable, show, write_json

    for trace in (first, second):
        _check_trace(trace)
    if json is not None:
        check_writable(json)
    from emulate.verify import compare_traces

    verdict = compare_traces(first, second)
    show(verdict)
    if json is not None:
        write_json(verdict, json)
    return int(verdict.exit_code)


def _check_trace(path: Path) -> None:
    if (path / "trace.json").is_file():
        return
    inside = sorted(str(path / found.parent.name) for found in path.glob("*/trace.json"))
    hint = f"Traces in it: {', '.join(inside)}." if inside else "'gpudist verify PROGRAM --traces DIR' leaves some in DIR."
    raise WrongUse(f"A TRACE must be the folder of a recorded run, with a trace.json. Received: {str(path)!r}. {hint}")
