"""Rehearse a job: run what its hosts would run on emulated hosts under their names, and verify the result."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulate.cluster import ClusterPlan, HostContext, Preload, RunningCluster, first_cause, patience_after, take_names
from emulate.errors import Hung, ProgramFailed
from emulate.launch.job import Job
from emulate.launch.target import HostCommand, Target
from emulate.program import Program
from emulate.told import Told
from emulate.topology import Topology
from emulate.verify.api import compare_traces, verify
from emulate.verify.verdict import Run, Verdict

STEPS = 5
_OF_VERIFY = re.compile(r"(?<!gpudist verify )--(allow|network|precision|steps|strict|timeout|traces)\b")
_PATIENCE = 2.5
"""Seconds for which the other hosts may report errors after the first."""


@dataclass(frozen=True)
class Rehearsed:
    """Become what a host would run, as the entry of an emulated host.

    Attributes:
        commands: The command of each host.
    """

    commands: tuple[HostCommand, ...]

    def __call__(self, context: HostContext) -> None:
        """Take this host's names, then run its command in place of this process."""
        take_names(context, [command.names for command in self.commands])
        own = self.commands[context.host]
        programs = context.directory / "bin"
        programs.mkdir()
        for name, text in own.programs.items():
            (programs / name).write_text(text, encoding="utf-8")
            (programs / name).chmod(0o755)
        path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        reader, writer = os.pipe()  # standard input stays open, as that of ssh does: its end would end the program
        os.dup2(reader, 0)
        os.set_inheritable(writer, True)
        environment = {**os.environ, **own.environment, "PATH": path}
        os.execvpe(own.argv[0], own.argv, environment)


def rehearse(
    program: Program, job: Job, target_of: Callable[[Job], Target], say: Callable[[str], None], *, timeout: float = 600.0
) -> Verdict:
    """Run a job on emulated hosts, recorded and on CPUs, and compare it with the program on one device.

    Args:
        program: The job's program.
        job: The job.
        target_of: Makes the scheduler's target for a job.
        say: Called with what the user should know.
        timeout: The time limit of each run in seconds.

    Returns:
        The verdict on what the hosts ran.

    Raises:
        ProgramFailed: If a host's command fails.
        Hung: If it does not end in time.
        Unavailable: If this machine cannot emulate hosts with names.
    """
    steps = job.steps or STEPS
    with tempfile.TemporaryDirectory(prefix="gpudist-rehearsal-") as place:
        here, traces = Path(place) / "job", Path(place) / "traces"
        here.mkdir()
        traces.mkdir()
        recorded = replace(job, folder=here, device="cpu", steps=steps, restarts=0)
        commands = tuple(target_of(recorded).host_commands())
        say(f"Rehearsing {job.name} on emulated hosts: {', '.join(command.names[0] for command in commands)}")
        run_commands(job.topology, commands, timeout)
        say("Comparing it with the program on one device")
        verdict = verify(program, job.topology, steps=steps, timeout=timeout, device="cpu", traces=traces)
        if verdict.reference.status == "ok":
            verdict = replace(verdict, runs=(compare_traces(traces / "reference", recorded.trace),))
        return _in_words_of_launch(verdict)


def _in_words_of_launch(verdict: Verdict) -> Verdict:
    """Return a verdict whose texts say of which command an option is that `gpudist launch` lacks."""

    def said(text: str) -> str:
        return _OF_VERIFY.sub(lambda option: "--record" if option[1] == "steps" else f"gpudist verify {option[0]}", text)

    def told(texts: tuple[Told, ...]) -> tuple[Told, ...]:
        return tuple(Told(text.code, said(text)) for text in texts)

    def of(run: Run) -> Run:
        causes = tuple(replace(cause, evidence=said(cause.evidence), fix=said(cause.fix)) for cause in run.causes)
        return replace(run, causes=causes, notes=told(run.notes), not_compared=told(run.not_compared))

    return replace(verdict, runs=(*map(of, verdict.runs),), notes=told(verdict.notes))


def run_commands(topology: Topology, commands: Sequence[HostCommand], timeout: float) -> None:
    """Run a command on each emulated host, and wait for their ends. Their output is relayed.

    Args:
        topology: The shape of the cluster.
        commands: The command of each host.
        timeout: The time limit in seconds.

    Raises:
        ProgramFailed: If a command fails.
        Hung: If one does not end in time.
        Unavailable: If this machine cannot emulate hosts with names.
    """
    with Preload(imports=False) as preload:
        directory = Path(tempfile.mkdtemp(dir=preload.directory))
        entry = Rehearsed(tuple(commands))
        plan = ClusterPlan(topology, entry, directory, tf_config=False, emulated=False, cwd=Path.cwd(), echo=True)
        with preload.launch(plan) as cluster:
            _wait(cluster, commands, timeout)


def _wait(cluster: RunningCluster, commands: Sequence[HostCommand], timeout: float) -> None:
    deadline, until = time.monotonic() + timeout, math.inf
    while not cluster.is_over and time.monotonic() < until:
        cluster.events(0.2)
        if time.monotonic() > deadline:
            raise Hung(f"The hosts' commands must end in time. Received: no end in {timeout:g} s.", reason="timeout", stacks={})
        if until == math.inf and (cause := first_cause(cluster.outcomes)) is not None:
            until = time.monotonic() + max(_PATIENCE, patience_after(cause))
    failed = first_cause(cluster.outcomes)
    if failed is None:
        return
    if failed.error is not None:
        if (error := failed.error.exception()) is not None:
            raise error
        how = failed.error.message
    else:
        how = f"exit code {failed.code}" if failed.status == "exited" else f"signal {-(failed.code or 0)}"
    name = commands[failed.host].names[0]
    raise ProgramFailed(f"The command of {name} must succeed. Received: {how}.", host=failed.host, traceback_text="")
