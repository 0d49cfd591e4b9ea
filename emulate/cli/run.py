"""Define `gpudist run`: use the emulator as a launcher, without recording."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import complain, exits_properly, program_args
from emulate.errors import ProgramFailed, UsageError
from emulate.faults import Fault, check_fired, check_for, parse_all
from emulate.program import Program, hint_for, own_traceback, shorten_traceback

if TYPE_CHECKING:
    from emulate.cluster import RunningCluster
    from emulate.topology import Topology

EXAMPLES = """Examples:

gpudist run train.py --topology 2x4

gpudist run train.py --topology 1x8 -- --epochs 3

gpudist run train.py --topology 2x2 --fault kill:host=1,step=5"""
_PATIENCE = 10.0
_WRONG_USE = f"{UsageError.__module__}.{UsageError.__qualname__}"  # seen only once the program's file has run


@exits_properly
def run(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    topology: Annotated[
        list[str], options.topology_option("Number of hosts x devices on each host, or HxD+Pps with P parameter servers.")
    ] = [options.DEFAULT_TOPOLOGY],  # noqa: B006 (typer copies it)
    device: options.DeviceOption = "auto",
    network: options.NetworkOption = "own",
    all_reduce: options.AllReduceOption = "auto",
    fault: options.FaultOption = [],  # noqa: B006 (typer copies it)
    grace: options.GraceOption = options.DEFAULT_GRACE,
) -> int:
    """Run PROGRAM on a topology: no recording, output passed through, the program's exit code."""
    if len(topology) > 1:
        given = " ".join(f"--topology {text}" for text in topology)
        raise UsageError(f"A run has one topology. Received: {given}. Run each by itself; gpudist verify takes several.")
    shape = options.topologies(topology)[0]
    options.check_choices(device=device, network=network, all_reduce=all_reduce)
    user_program = Program.find(options.program_target(program, module), program_args(context))
    from emulate.devices import choose_device

    choice = choose_device(device, [shape])
    for note in filter(None, (*user_program.notes, choice.why)):
        complain(note)
    faults = parse_all(fault)
    check_for(faults, shape)
    seconds = options.number_of_seconds(grace, "--grace")
    launch = partial(_launch, user_program, shape, choice.kind, all_reduce, network, faults, seconds)
    try:
        return launch(imports=True)
    except _NeedsFreshProcess:
        return launch(imports=False)


def _entry(program: Program, host: Any) -> None:
    """Run the program in each host, and print the traceback there, so that it is part of the program's output."""
    try:
        program.start()
    except (SystemExit, UsageError):
        raise
    except BaseException as error:
        print(shorten_traceback(own_traceback(error)), file=sys.stderr, flush=True)
        raise


class _NeedsFreshProcess(Exception):
    """Report that the program sets an environment variable that TensorFlow has already read."""


def _launch(
    program: Program,
    shape: Topology,
    device: str,
    all_reduce: str,
    network: str,
    faults: tuple[Fault, ...],
    grace: float,
    *,
    imports: bool,
) -> int:
    from emulate.cluster import ClusterPlan, Preload

    with Preload(imports=imports, modules=program.imports) as preload:
        directory = Path(tempfile.mkdtemp(dir=preload.directory))  # so that it goes even when we are killed
        entry = partial(_entry, program)
        plan = ClusterPlan(
            shape, entry, directory, device=device, all_reduce=all_reduce, network=network, cwd=Path.cwd(), echo=True
        )
        with preload.launch(replace(plan, faults=faults)) as cluster:
            code = _watch(cluster, grace)
        if code == 0:
            check_fired(faults, cluster.faults.fired)
        return code


def _watch(cluster: RunningCluster, grace: float) -> int:
    """Wait for the hosts; once one has failed the others get a short while, because they may never end."""
    from emulate.cluster import first_cause, first_sigterm

    notes_shown, until, is_handed_on = 0, math.inf, False
    with first_sigterm() as heard:
        while not cluster.is_over and time.monotonic() < until:
            for _, event in cluster.events(0.1):
                if event.get("event") == "needs-fresh-process":
                    raise _NeedsFreshProcess
                if event.get("event") == "note":
                    complain(str(event.get("text")))
            for note in cluster.notes[notes_shown:]:
                complain(note)
            notes_shown = len(cluster.notes)
            if heard and not is_handed_on:
                is_handed_on, until = True, heard[0] + grace
                complain(f"SIGTERM: the program has {grace:g} s to save and exit (--grace). Another SIGTERM ends it at once.")
                cluster.terminate()
            elif until == math.inf and first_cause(cluster.outcomes) is not None:
                until = time.monotonic() + _PATIENCE
    if is_handed_on and not cluster.is_over:
        complain(f"The program did not exit within {grace:g} s after SIGTERM (--grace), so gpudist ended it.")
        return 128 + signal.SIGTERM
    for fired in cluster.faults.fired:
        complain(f"A fault was injected: {fired}.")
    failed = first_cause(cluster.outcomes)
    if failed is None or failed.status == "returned":
        return 0
    if failed.error is not None and failed.error.kind == _WRONG_USE:
        raise UsageError(failed.error.message)
    if failed.error is not None and (hint := hint_for(failed.error.traceback_text)):
        complain(hint)
    if failed.status == "killed":
        complain(f"The process of {cluster.name(failed.host)} was ended by signal {-(failed.code or 0)}.")
    code = ProgramFailed.exit_code if failed.status == "raised" else 1 if failed.code is None else failed.code
    return code if code >= 0 else 128 - code
