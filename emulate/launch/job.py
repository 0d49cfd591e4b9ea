"""Describe a job for a cluster: what each host runs, what it needs, and where its log is."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from emulate.errors import UsageError
from emulate.program import Program
from emulate.topology import Topology

PREPARE = "export PYTHONUNBUFFERED=1  # a log is there when it is written"
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MOST_OF_A_NAME = 40
_PATH = re.compile(r"/[\w./+@=-]*")
_MEMORY = re.compile(r"[1-9][0-9]*[MGT]")
_TIME = re.compile(r"([1-9][0-9]*)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Job:
    """Describe a job. It is checked when it is made.

    Attributes:
        name: A lower-case DNS label.
        topology: The hosts and the devices of each.
        program: What follows `python`: `train.py` or `-m package.train`, without the program's own arguments.
        args: The program's own arguments.
        folder: An absolute folder that all hosts see, for scripts, logs and the trace.
        workdir: The absolute working directory on each host; None for the one that the image has.
        python: The interpreter on the hosts.
        device: `gpu` or `cpu`.
        cpus: CPU cores for each host, None for the scheduler's default.
        memory: Memory of each host such as `64G`, None for the scheduler's default.
        seconds: The time limit, None for the scheduler's default.
        restarts: How often the job may be restarted after exit code 75 or preemption.
        steps: How many training steps are recorded, None to run the program unrecorded.

    Raises:
        UsageError: If a value is not valid.
    """

    name: str
    topology: Topology
    program: tuple[str, ...]
    args: tuple[str, ...]
    folder: Path
    workdir: Path | None = None
    python: str = sys.executable
    device: str = "gpu"
    cpus: int | None = None
    memory: str | None = None
    seconds: int | None = None
    restarts: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _MOST_OF_A_NAME:
            raise UsageError(
                f"--name must have 1 to {_MOST_OF_A_NAME} lower-case letters, digits and hyphens, and begin with a letter. "
                f"Received: --name {self.name!r}."
            )
        for option, path in (("--folder", self.folder), ("--workdir", self.workdir)):
            if path is not None and not _PATH.fullmatch(str(path)):
                raise UsageError(
                    f"{option} must be a path without spaces and special characters. Received: {option} {str(path)!r}. "
                    "Job scripts of schedulers cannot hold them."
                )
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise UsageError(f"--memory must be a number with M, G or T. Received: --memory {self.memory!r}. Try --memory 64G.")
        if self.topology.num_ps:
            raise UsageError(
                f"gpudist launch starts workers only. Received: --topology {self.topology}. Use a topology without +Pps."
            )
        if self.device == "cpu" and self.topology.num_devices > 1 and self.steps is None:
            raise UsageError(
                f"On CPUs TensorFlow gives each host one device. Received: --device cpu --topology {self.topology}. Use "
                f"{self.topology.num_hosts}x1, or --record, which emulates the others."
            )
        if self.steps is not None and self.restarts:
            raise UsageError(
                f"A recorded job is not restarted. Received: --record {self.steps} --restarts {self.restarts}. Use one of them."
            )

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return self.topology.num_hosts

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of each host."""
        return self.topology.num_devices if self.device == "gpu" else 0

    @property
    def trace(self) -> Path:
        """Return the folder of the trace, which `gpudist compare` takes."""
        return self.folder / "trace"

    @property
    def command(self) -> tuple[str, ...]:
        """Return what each host runs. A recorded program is started by gpudist, which the hosts must then have."""
        if self.steps is None:
            return (self.python, *self.program, *self.args)
        options = ("--topology", str(self.topology), "--steps", str(self.steps), "--device", self.device)
        trace = ("--trace", str(self.trace))
        return (self.python, "-m", "emulate.launch.record", *options, *trace, *self.program, "--", *self.args)


def tf_config(workers: str, index: str) -> str:
    """Return the text of TF_CONFIG. A shell or Kubernetes may fill in the parts.

    Args:
        workers: The addresses (`host:port`), as JSON strings with commas between them.
        index: The number of the host.

    Returns:
        One JSON object.
    """
    return '{"cluster": {"worker": [' + workers + ']}, "task": {"type": "worker", "index": ' + index + "}}"


def no_proxy(hosts: str) -> str:
    """Return a shell command that exempts hosts from the proxy, to which gRPC would send what they write to each other.

    Args:
        hosts: Their names, with commas between them. The shell may fill them in.

    Returns:
        The command. A proxy itself stays: the program may need it to download data.
    """
    # gRPC reads no_proxy only where there is no no_grpc_proxy. For an empty entry some versions leave out the proxy everywhere.
    return f'export no_grpc_proxy="{hosts}${{no_grpc_proxy:+,$no_grpc_proxy}}${{no_proxy:+,$no_proxy}}"'


def program_of(program: Program, target: str, *, is_recorded: bool) -> tuple[str, ...]:
    """Return what follows `python` to run a program on a host.

    Args:
        program: The program.
        target: How the user named it.
        is_recorded: Whether gpudist starts it, which can start notebooks and functions, too.

    Returns:
        `("train.py",)` or `("-m", "package.train")`.

    Raises:
        UsageError: If python alone cannot run it.
    """
    if program.kind == "module":
        return ("-m", str(program.module))
    if program.kind != "script" and not is_recorded:
        raise UsageError(
            f"Without --record the hosts run PROGRAM with Python alone. Received: {target!r}, a {program.kind}. "
            "Name a script or a module: train.py or -m package.train."
        )
    return (target,)


def default_name(target: str, stamp: str) -> str:
    """Return a job's name, made from the program's name and a time: `train-0131-235959`."""
    words: list[str] = re.findall(r"[a-z0-9]+", Path(target.removeprefix("-m ").partition(":")[0]).stem.lower())
    stem = "-".join(words)[: _MOST_OF_A_NAME - len(stamp) - 1].strip("-").lstrip("0123456789-")
    return f"{stem or 'job'}-{stamp}"


def number_of_seconds(text: str) -> int:
    """Return the seconds of `--time-limit`: `90m`, `12h`, `2d`. Raise UsageError for another text."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--time-limit must be a number with s, m, h or d. Received: --time-limit {text!r}. Try --time-limit 90m."
        )
    return int(match[1]) * _SECONDS[match[2]]


_LOG_FILES = "host-*.log"


def log_file(folder: Path, host: int | str) -> Path:
    """Return the log file of a host."""
    return folder / _LOG_FILES.replace("*", str(host))


class JobLogs:
    """Relay what hosts write, line by line, with the name of the host.

    Args:
        folder: The job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def relay(self, *, is_last: bool = False) -> None:
        """Print the lines that are new. The last time also one without an end."""
        for file in sorted(self._folder.glob(_LOG_FILES), key=lambda path: (len(path.name), path.name)):
            with file.open("rb") as log:
                log.seek(self._read.get(file, 0))
                text = log.read()
            end = len(text) if is_last else text.rfind(b"\n") + 1
            self._read[file] = self._read.get(file, 0) + end
            host = file.stem.removeprefix("host-")
            for line in text[:end].decode("utf-8", "replace").splitlines():
                print(f"[host {host}] {line}")
        sys.stdout.flush()
