"""`gpudist run`: the emulator as a launcher, without recording."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import complain, exits_properly, program_args
from emulate.cli.options import AllReduce, Device, Network
from emulate.program import Program, own_traceback

if TYPE_CHECKING:
    from emulate.cluster import ClusterPlan, HostOutcome, RunningCluster

EXAMPLES = """Examples:

gpudist run train.py --topology 2x4

gpudist run train.py --topology 1x8 -- --epochs 3"""
_GRACE = 10.0
_RAISED = 3


@exits_properly
def run(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    topology: Annotated[
        str, typer.Option("--topology", metavar="HxD", help="Hosts x devices each.")
    ] = options.DEFAULT_TOPOLOGY,
    device: options.DeviceOption = Device.AUTO,
    network: options.NetworkOption = Network.OWN,
    all_reduce: options.AllReduceOption = AllReduce.AUTO,
) -> int:
    """Run PROGRAM on an emulated topology: no recording, output passed through, the program's exit code."""
    shape = options.topologies([topology])[0]
    found = Program.find(options.program_target(program, module), program_args(context))
    from emulate.cluster import ClusterPlan

    with tempfile.TemporaryDirectory(prefix="gpudist-run-") as folder:
        plan = ClusterPlan(
            topology=shape,
            entry=partial(_entry, found),
            directory=Path(folder),
            all_reduce=all_reduce.value,
            network=network.value,
            cwd=Path.cwd(),
            echo=True,
        )
        return _launch(plan, imports=True)


def _entry(program: Program, host: Any) -> None:
    """What each host does. The traceback is printed there, so that it is among the program's own output."""
    try:
        program.start()
    except SystemExit:
        raise
    except BaseException as error:
        print(own_traceback(error), file=sys.stderr, flush=True)
        raise


class _NeedsFreshProcess(Exception):
    """The program sets a variable of the environment that TensorFlow has read by now."""


def _launch(plan: ClusterPlan, *, imports: bool) -> int:
    from emulate.cluster import Preload

    try:
        with Preload(imports=imports) as preload, preload.launch(plan) as cluster:
            return _watch(cluster)
    except _NeedsFreshProcess:
        return _launch(plan, imports=False)


def _watch(cluster: RunningCluster) -> int:
    """Wait for the hosts; once one has failed the others get a short while, because they may never end."""
    for note in cluster.notes:
        complain(note)
    failed: HostOutcome | None = None
    deadline: Callable[[], bool] = lambda: False  # noqa: E731
    while not cluster.is_over and not deadline():
        for _, event in cluster.events(0.1):
            _tell(event)
        if failed is None and (failed := _first_failure(cluster)) is not None:
            deadline = partial(_is_past, time.monotonic() + _GRACE)
    failed = failed or _first_failure(cluster)
    return 0 if failed is None else _exit_code(failed)


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def _tell(event: dict[str, Any]) -> None:
    if event.get("event") == "needs-fresh-process":
        raise _NeedsFreshProcess
    if event.get("event") == "note":
        complain(str(event.get("text")))


def _first_failure(cluster: RunningCluster) -> HostOutcome | None:
    return next((outcome for outcome in cluster.outcomes if outcome is not None and _exit_code(outcome)), None)


def _exit_code(outcome: HostOutcome) -> int:
    if outcome.status == "returned":
        return 0
    if outcome.status == "raised":
        return _RAISED
    code = outcome.code if outcome.code is not None else 1
    return code if code >= 0 else 128 - code
