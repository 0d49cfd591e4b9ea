"""Define `gpudist launch`: start a program on a real cluster, watch it, end it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emulate.cli import options
from emulate.cli.command import complain, exits_properly, program_args
from emulate.cli.options import flag, option
from emulate.errors import UsageError

if TYPE_CHECKING:
    from emulate.launch import Job, Target

EXAMPLES = """Examples:

gpudist launch train.py --slurm --topology 2x4 --partition gpu --time-limit 2h

gpudist launch train.py --jobset --topology 2x8 --image train:1 --dry-run

gpudist launch train.py --hosts hosts.txt --topology 2x1 --record 5

gpudist launch --status gpudist-jobs/train-0131-235959"""
_JOBS = "gpudist-jobs"
_MOUNT = Path("/gpudist")
_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("partition", "account"), ("slurm",)),
    **dict.fromkeys(("image", "namespace", "claim", "queue", "gpu_resource"), ("jobset", "trainjob")),
    **dict.fromkeys(("cpus", "memory"), ("slurm", "jobset", "trainjob")),
    **dict.fromkeys(("port", "grace"), ("hosts",)),
}
"""By option the targets that it is for."""
_JOB = "JOB is its folder."


@exits_properly
def launch(
    context: typer.Context,
    program: options.ProgramArgument = None,
    module: options.ModuleOption = None,
    slurm: Annotated[bool, flag("--slurm", "Launch on Slurm, with sbatch.")] = False,
    jobset: Annotated[bool, flag("--jobset", "Launch on Kubernetes as a JobSet, with kubectl.")] = False,
    trainjob: Annotated[
        bool, flag("--trainjob", "Launch on Kubernetes as a TrainJob of Kubeflow Trainer, with kubectl.")
    ] = False,
    hosts: Annotated[Path | None, option("--hosts", "FILE", "Launch by ssh on the hosts in FILE, one on each line.")] = None,
    topology: Annotated[
        str | None, option("--topology", "HxD", "Number of hosts x GPUs on each host. Default for --hosts: 1 GPU each.")
    ] = None,
    device: Annotated[str, options.choice("--device", ("gpu", "cpu"), "Device type.")] = "gpu",
    name: Annotated[str | None, option("--name", "NAME", "Name of the job. Default: program and time.")] = None,
    folder: Annotated[
        Path | None,
        option("--folder", "DIR", f"Folder of the job, which all hosts see: scripts, logs, trace. Default: {_JOBS}/NAME."),
    ] = None,
    workdir: Annotated[
        Path | None,
        option(
            "--workdir", "DIR", "Working directory on the hosts. Default: the current folder; with --image, that of the image."
        ),
    ] = None,
    python: Annotated[
        str | None, option("--python", "PATH", "Interpreter on the hosts. Default: this one; in an image: python3.")
    ] = None,
    image: Annotated[str | None, option("--image", "IMAGE", "Container image with the program, for Kubernetes.")] = None,
    namespace: Annotated[str | None, option("--namespace", "NAME", "Kubernetes namespace. Default: kubectl's.")] = None,
    claim: Annotated[
        str | None, option("--claim", "NAME", f"PersistentVolumeClaim that all pods can write, mounted at {_MOUNT}.")
    ] = None,
    queue: Annotated[str | None, option("--queue", "NAME", "Queue of Kueue.")] = None,
    gpu_resource: Annotated[
        str | None, option("--gpu-resource", "NAME", "Kubernetes resource of a GPU. Default: nvidia.com/gpu.")
    ] = None,
    partition: Annotated[str | None, option("--partition", "NAME", "Slurm partition.")] = None,
    account: Annotated[str | None, option("--account", "NAME", "Slurm account.")] = None,
    port: Annotated[str | None, option("--port", "N", "Port of the first host, with --hosts. Default: 2222.")] = None,
    grace: Annotated[
        str | None, option("--grace", "S", "Seconds that the program has after SIGTERM, with --hosts. Default: 30.")
    ] = None,
    cpus: Annotated[str | None, option("--cpus", "N", "CPU cores of each host.")] = None,
    memory: Annotated[str | None, option("--memory", "SIZE", "Memory of each host, such as 64G.")] = None,
    time_limit: Annotated[str | None, option("--time-limit", "TIME", "Time limit, such as 90m, 12h or 2d.")] = None,
    restarts: Annotated[str, option("--restarts", "N", "Restarts after exit code 75 (gd.Checkpoints) or a preemption.")] = "0",
    record: Annotated[
        str | None, option("--record", "N", "Record the first N steps, then end. 'gpudist compare' compares the trace.")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print what would be submitted, and end.")] = False,
    rehearse: Annotated[
        bool, flag("--rehearse", "Run the command of each host on an emulated host, verify it, and exit.")
    ] = False,
    detach: Annotated[bool, flag("--detach", "Do not wait for the end of the job.")] = False,
    status: Annotated[Path | None, option("--status", "JOB", f"Print the state of a job, and end. {_JOB}")] = None,
    logs: Annotated[Path | None, option("--logs", "JOB", f"Print the logs of a job, and end. {_JOB}")] = None,
    cancel: Annotated[Path | None, option("--cancel", "JOB", f"Cancel a job, and end. {_JOB}")] = None,
) -> int:
    """Launch PROGRAM on Slurm, on Kubernetes or on hosts with ssh. Ctrl-C ends the job."""
    if (code := _look_at(status, logs, cancel)) is not None:
        return code
    given = {name: value for name, value in locals().items() if name in _FOR}
    kind = _kind(slurm=slurm, jobset=jobset, trainjob=trainjob, hosts=hosts is not None)
    _check_options(kind, given, is_recorded=record is not None and not rehearse)
    from emulate.launch import Job, default_name, follow, make_folder, number_of_seconds, program_of, read_hosts
    from emulate.program import Program
    from emulate.topology import Topology

    if device not in ("gpu", "cpu"):
        raise UsageError(f"--device must be gpu or cpu. Received: --device {device!r}.")
    addresses = read_hosts(hosts) if hosts is not None else []
    if topology is None and not addresses:
        raise UsageError(f"--{kind} needs a topology. Received: none. Write --topology 2x4 for two hosts with four GPUs each.")
    target = options.program_target(program, module)
    user_program = Program.find(target, program_args(context))
    steps = _number("--record", record, lowest=1)
    in_image = kind in ("jobset", "trainjob")
    name = name or default_name(target, time.strftime("%m%d-%H%M%S"))
    here = (folder or Path(_JOBS) / name).absolute()
    job = Job(
        name=name,
        topology=Topology.parse(topology or f"{len(addresses)}x1"),
        program=program_of(user_program, target, is_recorded=steps is not None),
        args=program_args(context),
        folder=_MOUNT / name if in_image else here,
        workdir=workdir or (None if in_image else Path.cwd()),
        device=device,
        cpus=_number("--cpus", cpus, lowest=1),
        memory=memory,
        seconds=None if time_limit is None else number_of_seconds(time_limit),
        restarts=_number("--restarts", restarts) or 0,
        steps=steps,
        **({"python": python or "python3"} if in_image or python else {}),
    )
    scheduler = _target(kind, job, here, addresses, given)
    if dry_run:
        print(scheduler.text, end="")
        return 0
    if rehearse:
        from emulate.launch.rehearsal import rehearse as rehearse_job
        from emulate.report import show

        verdict = rehearse_job(user_program, job, lambda other: _target(kind, other, here, addresses, given), complain)
        show(verdict, sys.stdout)
        return verdict.exit_code
    if detach and kind == "hosts":
        raise UsageError("gpudist itself holds the connections to plain hosts. Received: --hosts --detach. Leave --detach out.")
    make_folder(here)
    state = follow(scheduler, here, complain, is_detached=detach)
    if not detach:
        complain(f"{state}. Logs: {here}/host-*.log")
        if job.steps is not None and state.exit_code == 0:
            complain(f"Compare it: gpudist compare DIR/reference {here / job.trace.name} (DIR of gpudist verify --traces DIR).")
    return 0 if detach else state.exit_code


def _look_at(status: Path | None, logs: Path | None, cancel: Path | None) -> int | None:
    """Do what `--status`, `--logs` or `--cancel` asks for. Return the exit code; None without them."""
    from emulate import launch
    from emulate.launch.target import read

    if logs is not None:
        read(logs)
        launch.JobLogs(logs).relay(is_last=True)
    elif status is not None:
        print(launch.status(status))
    elif cancel is not None:
        print(launch.cancel(cancel))
    else:
        return None
    return 0


def _kind(**chosen: bool) -> str:
    kinds = [kind for kind, is_chosen in chosen.items() if is_chosen]
    if len(kinds) != 1:
        received = " ".join(f"--{kind}" for kind in kinds) or "none"
        raise UsageError(f"One target must be given: --slurm, --jobset, --trainjob or --hosts FILE. Received: {received}.")
    return kinds[0]


def _check_options(kind: str, given: dict[str, Any], *, is_recorded: bool) -> None:
    for name, value in given.items():
        if value is not None and kind not in _FOR[name]:
            targets = " and ".join(f"--{target}" for target in _FOR[name])
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} goes with {targets}. Received: --{kind} {option} {value!r}. Leave {option} out.")
    if kind in _FOR["image"] and given["image"] is None:
        raise UsageError(f"--{kind} needs a container image with the program. Received: none. Write --image IMAGE.")
    if kind in _FOR["claim"] and given["claim"] is None and is_recorded:
        raise UsageError(
            "The pods of a recorded job need a shared volume for the trace. Received: --record without --claim. "
            "Name a PersistentVolumeClaim that all pods can write: --claim NAME."
        )


def _number(option: str, text: str | None, *, lowest: int = 0) -> int | None:
    if text is None or (text.isdecimal() and int(text) >= lowest):
        return None if text is None else int(text)
    raise UsageError(f"{option} must be a whole number >= {lowest}. Received: {option} {text!r}.")


def _target(kind: str, job: Job, folder: Path, addresses: list[str], given: dict[str, Any]) -> Target:
    from emulate.cluster import FIRST_PORT
    from emulate.launch import HostsBySsh, Kubernetes, KubernetesCluster, Slurm, load_yaml

    if kind == "slurm":
        return Slurm(job, {name: given[name] for name in ("partition", "account") if given[name] is not None})
    if kind == "hosts":
        port = _number("--port", given["port"], lowest=1)
        return HostsBySsh(job, addresses, port or FIRST_PORT, _number("--grace", given["grace"], lowest=1) or 30)
    load_yaml()
    named = {name: given[name] for name in ("image", "namespace", "claim", "queue", "gpu_resource")}
    return Kubernetes(
        job, KubernetesCluster(**{name: value for name, value in named.items() if value is not None}), kind, folder
    )
