"""Define `gpudist verify`, the main command, and `gpudist compare` for two recorded runs, also from other machines."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import HtmlOption, JsonOption, check_outputs, exits_properly, program_args
from emulate.cli.fix import check_libcst, show_edits, tell_of_try
from emulate.cli.options import flag, option
from emulate.errors import UsageError
from emulate.told import told

if TYPE_CHECKING:
    from emulate.verify import Verdict

EXAMPLES = """Examples:

gpudist verify train.py --topology 1x4 --topology 2x2

gpudist verify train.py --steps all --json v.json --html v.html -- --epochs 1

gpudist verify -m package.train --allow batchnorm-local-statistics

gpudist verify train.py --topology 2x2 --fault kill:host=1,step=5"""


@exits_properly
def verify(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    topology: Annotated[
        list[str],
        options.topology_option(
            "Number of hosts x devices on each host, or HxD+Pps with P parameter servers. Repeatable. Default: 1x4."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    device: options.DeviceOption = "auto",
    seed: Annotated[str, option("--seed", "N", "Seed of Python, NumPy, TensorFlow and Keras on every host.")] = "0",
    steps: Annotated[
        str,
        option(
            "--steps",
            "N|all|auto",
            "Training steps to compare. Later code does not run. auto: 20 steps, or up to 50 to finish the first epoch.",
        ),
    ] = options.DEFAULT_STEPS,
    timeout: options.TimeoutOption = options.DEFAULT_TIMEOUT,
    network: options.NetworkOption = "own",
    all_reduce: options.AllReduceOption = "auto",
    precision: options.PrecisionOption = "float32",
    allow: options.AllowOption = [],  # noqa: B006
    strict: options.StrictOption = False,
    fault: options.FaultOption = [],  # noqa: B006
    restarts: Annotated[
        str | None,
        option(
            "--restarts",
            "N",
            f"With --fault: the maximum number of restarts of all hosts. Default: {options.DEFAULT_RESTARTS}.",
        ),
    ] = None,
    reference_arg: Annotated[
        list[str],
        option(
            "--reference-arg",
            "X",
            "Argument of the program in the reference run, such as --reference-arg=--num-gpus=1. It replaces ARGS there. "
            "Repeatable.",
        ),
    ] = [],  # noqa: B006
    against: Annotated[
        str | None,
        option(
            "--against",
            "ARGS",
            "Compare with PROGRAM with other arguments (or NAME=value) on the same topology, instead of on one device.",
        ),
    ] = None,
    virtual: Annotated[
        bool,
        flag(
            "--virtual",
            "Run all replicas one after the other in one process, without TensorFlow's collectives. "
            "For large topologies, such as 1x1024.",
        ),
    ] = False,
    thorough: Annotated[
        bool,
        flag(
            "--thorough",
            "Look for causes without a limit. Else that ends, for each topology, after 6 starts of the program or 40 "
            "evaluations of its steps.",
        ),
    ] = False,
    fix: Annotated[
        bool,
        flag("--fix", "Also look for edits that gpudist can prove, and add them to the reports. `gpudist fix` writes them."),
    ] = False,
    json: JsonOption = None,
    html: HtmlOption = None,
    sarif: Annotated[
        str | None, option("--sarif", "FILE", "Also write the findings as SARIF 2.1.0, for code hosts and editors.")
    ] = None,
    traces: Annotated[
        Path | None, option("--traces", "DIR", "Save the trace of each run in this folder, for gpudist compare.")
    ] = None,
    certificate: Annotated[
        str | None,
        option(
            "--certificate",
            "FILE",
            "If the verdict is equivalent or by-design, write the first steps to this file, for gpudist_core.check in the "
            "real run.",
        ),
    ] = None,
) -> int:
    """Verify that PROGRAM trains the same model on these topologies as on one device."""
    from emulate.program import Program
    from emulate.report import progress_on

    chosen, from_file = options.fill_from_file(
        context, topology=topology, steps=steps, allow=allow, strict=strict, timeout=timeout
    )
    wanted, allow = options.topologies(chosen["topology"], is_virtual=virtual), chosen["allow"]
    count, seconds = options.number_of_steps(chosen["steps"]), options.number_of_seconds(chosen["timeout"])
    number = options.number_of_seed(seed)
    again = options.number_of_restarts(restarts, fault)
    options.check_choices(device=device, network=network, all_reduce=all_reduce, precision=precision)
    user_program = Program.find(options.program_target(program, module), program_args(context))
    others = {"the program itself": user_program.file, "the folder of --traces": traces}
    files = check_outputs(json, html, others, sarif=sarif, certificate=certificate)
    if fix:
        check_fixable(traces, certificate, against)
    if traces is not None:
        check_folder(traces)
    options.check_codes(allow)
    given: dict[str, Any] = {
        "device": device,
        "seed": number,
        "steps": count,
        "timeout": seconds,
        "network": network,
        "all_reduce": all_reduce,
        "precision": precision,
        "allow": tuple(allow),
        "strict": chosen["strict"],
        "faults": tuple(fault),
        "restarts": again,
        "reference_args": tuple(reference_arg) or None,
        "against": against,
        "virtual": virtual,
        "thorough": thorough,
    }
    report = None
    with progress_on() as progress:
        if fix:
            from emulate.fix import fix as fix_program

            report = fix_program(user_program, wanted, tell=tell_of_try, progress=progress, **given)
            verdict = report.verdict
        else:
            from emulate.verify import verify as verify_program

            verdict = verify_program(
                user_program, topology=wanted, traces=traces, certificate=files.certificate, progress=progress, **given
            )
    files.write(replace(verdict, notes=(*verdict.notes, *from_file)))
    if report is not None:
        show_edits(report, files.screen)
    return int(verdict.exit_code)


def check_fixable(traces: Path | None, certificate: str | None, against: str | None) -> None:
    """Check what `--fix` needs: LibCST, no files that each verification of an edited program would write anew, and causes."""
    for name, value in (("--traces", traces), ("--certificate", certificate), ("--against", against)):
        if value is not None:
            raise UsageError(f"--fix must stand without {name}. Received: {name} {str(value)!r}. Leave one of them out.")
    check_libcst()


def check_folder(folder: Path) -> None:
    """Make the folder of `--traces`, and see that it is one and empty."""
    received = f"Received: --traces {str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        full = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--traces must name a folder that can be written. {received} ({error.strerror}).") from None
    if full:
        raise UsageError(f"--traces must name an empty folder. {received}, which has contents. Name a new one.")


COMPARE_EXAMPLES = """Example:

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
    json: JsonOption = None,
    html: HtmlOption = None,
) -> int:
    """Compare two recorded runs, also from different machines. The first is the reference."""
    for path in (reference, trace):
        if not (path / "trace.json").is_file():
            inside = ", ".join(sorted(str(path / file.parent.name) for file in path.glob("*/trace.json")))
            hint = f"Traces in it: {inside}." if inside else "'gpudist verify PROGRAM --traces DIR' writes traces into DIR."
            rule = "A TRACE must be the folder of a recorded run, with a trace.json."
            raise UsageError(f"{rule} Received: {str(path)!r}. {hint}")
    files = check_outputs(json, html)
    chosen, from_file = options.fill_from_file(context, allow=allow, strict=strict)
    options.check_codes(chosen["allow"])
    verdict = _verdict_of_traces(reference, trace, chosen["allow"])
    verdict = replace(verdict, strict=chosen["strict"], notes=(*verdict.notes, *from_file))
    files.write(verdict)
    return verdict.exit_code


_OTHER_SETTING = told("other-setting")("The two runs had a different {}: {} in the reference, {} here.")


def _verdict_of_traces(reference: Path, trace: Path, allow: list[str]) -> Verdict:
    from emulate.verify import Reference, Verdict, compare_traces

    run = compare_traces(reference, trace, allow=allow)
    first, second = (json_module.loads((path / "trace.json").read_text(encoding="utf-8")) for path in (reference, trace))
    ours, theirs = ({**about, **dict(about.get("versions") or {})} for about in (first, second))
    settings = ["program", "seed", "precision", "device", *dict(first.get("versions") or {})]
    differing = [name for name in settings if ours.get(name) != theirs.get(name)]
    return Verdict(
        program=str(second.get("program") or trace),
        seed=int(second.get("seed") or 0),
        device=str(second.get("device") or "cpu"),
        versions={str(name): str(version) for name, version in dict(second.get("versions") or {}).items()},
        reference=Reference("ok", run.steps),
        runs=(run,),
        notes=tuple(_OTHER_SETTING.format(name, ours.get(name), theirs.get(name)) for name in differing),
    )
