"""Define `gpudist compare`: compare two recorded runs, also from other machines."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options, outputs, settings
from emulate.cli.command import exits_properly
from emulate.errors import UsageError

if TYPE_CHECKING:
    from emulate.verify import Verdict

EXAMPLES = """Example:

gpudist verify train.py --topology 1x4 --traces here

gpudist compare here/reference here/1x4"""
_Trace = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A run's folder: DIR/reference or DIR/1x4 of verify --traces DIR, DIR/trace of launch --record.",
        show_default=False,
    ),
]


@exits_properly
def compare(
    context: typer.Context,
    reference: _Trace,
    trace: _Trace,
    allow: options.AllowOption = [],  # noqa: B006
    strict: options.StrictOption = False,
    json: outputs.JsonOption = None,
    html: outputs.HtmlOption = None,
) -> int:
    """Compare two recorded runs, also from different machines. The first is the reference."""
    for folder in (reference, trace):
        _check_trace(folder)
    files = outputs.check(json, html)
    chosen, from_file = settings.fill(context, allow=allow, strict=strict)
    options.check_codes(chosen["allow"])
    verdict = _verdict(reference, trace, chosen["allow"])
    verdict = replace(verdict, strict=chosen["strict"], notes=(*verdict.notes, *filter(None, [from_file])))
    files.write(verdict)
    return verdict.exit_code


def _check_trace(path: Path) -> None:
    if (path / "trace.json").is_file():
        return
    inside = sorted(str(path / file.parent.name) for file in path.glob("*/trace.json"))
    hint = f"Traces in it: {', '.join(inside)}." if inside else "'gpudist verify PROGRAM --traces DIR' writes traces into DIR."
    raise UsageError(f"A TRACE must be the folder of a recorded run, with a trace.json. Received: {str(path)!r}. {hint}")


def _verdict(reference: Path, trace: Path, allow: list[str]) -> Verdict:
    from emulate.verify import Reference, Verdict, compare_traces

    run = compare_traces(reference, trace, allow=allow)
    first, second = _about(reference), _about(trace)
    return Verdict(
        program=str(second.get("program") or trace),
        seed=int(second.get("seed") or 0),
        device=str(second.get("device") or "cpu"),
        versions={str(name): str(version) for name, version in dict(second.get("versions") or {}).items()},
        reference=Reference("ok", run.steps),
        runs=(run,),
        notes=tuple(_differences(first, second)),
    )


def _about(trace: Path) -> dict[str, Any]:
    about: dict[str, Any] = json_module.loads((trace / "trace.json").read_text(encoding="utf-8"))
    return about


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return what differed between the runs' settings and may explain a difference."""
    reference, other = ({**about, **dict(about.get("versions") or {})} for about in (first, second))
    names = ["program", "seed", "precision", "device", *dict(first.get("versions") or {})]
    return [
        f"The two runs had a different {name}: {reference.get(name)} in the reference, {other.get(name)} here."
        for name in names
        if reference.get(name) != other.get(name)
    ]
