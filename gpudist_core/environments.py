"""Find out where the program runs: on this machine, or as a task of TF_CONFIG, of a Slurm step or of a given cluster.

A Slurm step (`srun`) is read from its environment variables. Some have compressed lists: nodes (`n[01-03,7]-ib,m5`) and tasks
per node (`4(x2),3`). TensorFlow's resolver (2.21) reads names that end with their brackets alone, and zips nodes and counts of
different length.

The devices of this machine are listed without starting TensorFlow's runtime: a cluster's server must start first. A CUDA
library is opened before, which TensorFlow 2.21's wheel needs and does not find: without it TensorFlow sees no GPU. `pip install
tensorflow[and-cuda]` installs libcusolver. But the object that opens it (libtensorflow_framework.so.2) searches only the
folders of the other libraries: "Cannot dlopen some GPU libraries. Skipping registering GPU devices". A library that is already
open is not searched for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpudist_core.errors import UsageError


@dataclass(frozen=True)
class Environment:
    """Describe where a program runs.

    Attributes:
        kind: The matching strategy: `one-device`, `mirrored`, `multi-worker` or `parameter-server`.
        num_hosts: Number of hosts that train. Parameter servers and their chief do not count.
        host: The number of this host among them; 0 for a task that does not train.
        role: The role of this process: `chief`, `worker`, `ps` or `evaluator`. On one host: `worker`.
        devices: This host's devices, for example `GPU:0`.
        source: What decided this: `TF_CONFIG`, `Slurm`, `the cluster given` or `this machine`.

    Example:
        >>> gd.environment().kind
        'one-device'
    """

    kind: str
    num_hosts: int
    host: int
    role: str
    devices: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        place = f"{self.role}, host {self.host} of {self.num_hosts}" if self.num_hosts > 1 else f"{self.role}, 1 host"
        names = ", ".join(self.devices) if len(self.devices) < 4 else f"{self.devices[0]} to {self.devices[-1]}"
        return f"{self.kind}: {place}, {len(self.devices)} device{'s' * (len(self.devices) > 1)} ({names}), says {self.source}"


def environment(cluster: Any = None) -> Environment:
    """Return where this program runs: on one device, on the GPUs of this machine, or in a cluster.

    TensorFlow's runtime is not started.

    Args:
        cluster: The `cluster` argument of `make_strategy`. Default: TF_CONFIG, then Slurm, then this machine.

    Returns:
        The environment for which `make_strategy()` chooses a strategy.

    Raises:
        UsageError: If TF_CONFIG, Slurm's variables or `cluster` are not valid.

    Example:
        >>> import gpudist_core as gd
        >>> print(gd.environment())
        one-device: worker, 1 host, 1 device (...PU:0), says this machine
    """
    tasks = find_tasks(cluster)
    # Split devices are listed as their logical devices.
    devices = _named("GPU") or _named("CPU") or ("CPU:0",)
    if tasks is None or not tasks.trains:
        kind = "mirrored" if len(devices) > 1 else "one-device"
        role, source = (tasks.role, tasks.source) if tasks else ("worker", "this machine")
        return Environment(kind, 1, 0, role, devices, source)
    kind = "parameter-server" if tasks.has_servers else "multi-worker"
    return Environment(kind, tasks.num_hosts, tasks.host, tasks.role, devices, tasks.source)


def find_tasks(cluster: Any = None) -> Tasks | None:
    """Find the cluster of this process: the given one, the one in TF_CONFIG, or the Slurm step.

    Args:
        cluster: A cluster resolver, a `tf.train.ClusterSpec` (TF_CONFIG then says which task this is), a dictionary in the form
            of TF_CONFIG, or None.

    Returns:
        The tasks, or None if no cluster is configured.

    Raises:
        UsageError: If the cluster is not valid.
    """
    if cluster is not None:
        return _given(cluster)
    return tasks_of(tf_config(), "TF_CONFIG") or slurm_tasks()


def tf_config() -> Mapping[str, Any]:
    """Read TF_CONFIG.

    Returns:
        Its JSON object; empty if TF_CONFIG is not set.

    Raises:
        UsageError: If it is not a JSON object.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError("TF_CONFIG must be JSON", f"Parse error: {error}.", TF_CONFIG=_short(text)) from error
    if not isinstance(config, dict):
        raise UsageError(
            "TF_CONFIG must be a JSON object",
            "Set a JSON object with a cluster and a task, or unset TF_CONFIG.",
            TF_CONFIG=_short(text),
        )
    return config


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _given(cluster: Any) -> Tasks | None:
    import tensorflow as tf

    source = "the cluster given"
    if isinstance(cluster, Mapping):
        if not cluster.keys() & {"cluster", "task"}:
            raise UsageError(
                f"{source.capitalize()} must have a cluster and a task, in the form of TF_CONFIG", SHAPE, cluster=cluster
            )
        return tasks_of(cluster, source)
    if isinstance(cluster, tf.train.ClusterSpec):
        return tasks_of({"cluster": cluster.as_dict(), "task": tf_config().get("task")}, source)
    if not isinstance(cluster, tf.distribute.cluster_resolver.ClusterResolver):
        raise UsageError(
            "cluster must be a cluster resolver, a tf.train.ClusterSpec or a dictionary in the form of TF_CONFIG",
            cluster=cluster,
        )
    jobs = cluster.cluster_spec().as_dict()  # first: Slurm's resolver knows its task only afterwards
    task = {} if cluster.task_type is None else {"type": cluster.task_type, "index": cluster.task_id or 0}
    return tasks_of({"cluster": jobs, "task": task}, source) if jobs else None


ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class Tasks:
    """Describe the tasks of a cluster as one of them sees them.

    Attributes:
        jobs: The addresses (`host:port`) of the tasks of each job.
        role: The job of this process.
        index: Its number in that job.
        source: What defines the cluster: `TF_CONFIG`, `Slurm` or `the cluster given`.
    """

    jobs: Mapping[str, tuple[str, ...]]
    role: str
    index: int
    source: str

    @property
    def has_servers(self) -> bool:
        """Return whether the cluster has parameter servers."""
        return bool(self.jobs.get("ps"))

    @property
    def trains(self) -> bool:
        """Return whether this task trains together with other hosts. An evaluator does not."""
        return self.role != "evaluator" and (self.has_servers or self.num_hosts > 1)

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts that train: the workers, plus the chief if there are no parameter servers."""
        if self.role == "evaluator":
            return 1
        return len(self.jobs.get("worker", ())) + (0 if self.has_servers else len(self.jobs.get("chief", ())))

    @property
    def host(self) -> int:
        """Return the number of this host among those that train; 0 for a task that does not train."""
        if self.role != "worker":
            return 0
        return self.index + (0 if self.has_servers else len(self.jobs.get("chief", ())))

    @property
    def address(self) -> str | None:
        """Return the address of this task; None for an evaluator outside the cluster."""
        addresses = self.jobs.get(self.role, ())
        return addresses[self.index] if self.index < len(addresses) else None

    @property
    def leader(self) -> str | None:
        """Return the name of the task that coordinates the training; None if it is this task."""
        leader = "chief 0" if self.jobs.get("chief") else "worker 0"
        return None if leader == f"{self.role} {self.index}" else leader

    @property
    def peers(self) -> dict[str, str]:
        """Return the addresses of the other tasks that take part in the training, by name (`worker 1` for example)."""
        return {
            f"{job} {i}": address
            for job in ("chief", "worker", "ps")
            for i, address in enumerate(self.jobs.get(job, ()))
            if (job, i) != (self.role, self.index)
        }


def tasks_of(config: Mapping[str, Any], source: str) -> Tasks | None:
    """Read the tasks from a dictionary in the form of TF_CONFIG.

    Args:
        config: `{"cluster": {job: [address, ...]}, "task": {"type": job, "index": number}}`.
        source: The name of the setting, for error messages.

    Returns:
        The tasks; None if the dictionary has neither a cluster nor a task.

    Raises:
        UsageError: If the dictionary is not valid.
    """
    if not config.get("cluster") and not config.get("task"):
        return None
    jobs = _jobs(config.get("cluster"), source)
    role, index = _task(config.get("task"), source)
    if role not in jobs and role != "evaluator":
        raise UsageError(
            f"The task type of {source} must be a job of its cluster", "Name one of its jobs.", type=role, cluster=list(jobs)
        )
    number = len(jobs.get(role, ())) or index + 1
    if not 0 <= index < number:
        raise UsageError(
            f"The task index of {source} must be the number of a task of its job, counted from 0",
            f"The job {role} has tasks {role} 0 to {role} {number - 1}.",
            index=index,
        )
    return Tasks(jobs, role, index, source)


def _jobs(cluster: Any, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, Mapping) or not all(isinstance(tasks, (list, tuple)) for tasks in cluster.values()):
        raise UsageError(f"The cluster of {source} must have a list of addresses for each job", SHAPE, cluster=cluster)
    jobs = {str(job): tuple(map(str, tasks)) for job, tasks in cluster.items() if tasks}
    if unknown := sorted(set(jobs) - set(ROLES)):
        raise UsageError(f"The jobs of {source} must be among {', '.join(ROLES)}", "Rename or remove the others.", jobs=unknown)
    if not jobs.get("worker") and not jobs.get("chief"):
        raise UsageError(f"The cluster of {source} must have a worker or a chief", "Add the task that trains.", jobs=list(jobs))
    if jobs.get("ps") and not jobs.get("worker"):
        raise UsageError(
            f"A cluster with parameter servers in {source} must have workers", "Add a worker, or remove ps.", jobs=list(jobs)
        )
    if len(jobs.get("chief", ())) > 1:
        raise UsageError(
            f"The cluster of {source} must have at most one chief", "Make the others workers.", chief=jobs["chief"]
        )
    _check_addresses([address for addresses in jobs.values() for address in addresses], source)
    return jobs


SHAPE = 'Write {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'


def _task(task: Any, source: str) -> tuple[str, int]:
    if not isinstance(task, Mapping) or "type" not in task or "index" not in task:
        raise UsageError(f"The task of {source} must have a type and an index", SHAPE, task=task)
    role, index = str(task["type"]), str(task["index"])
    if role not in ROLES:
        raise UsageError(f"The task type of {source} must be one of {', '.join(ROLES)}", type=role)
    if not index.removeprefix("-").isdecimal():
        raise UsageError(f"The task index of {source} must be an integer", "Count from 0.", index=task["index"])
    return role, int(index)


def _check_addresses(addresses: list[str], source: str) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"An address of {source} must be host:port", address=address)
    if twice := sorted({a for a in addresses if addresses.count(a) > 1}):
        raise UsageError(
            f"Each task of {source} must have its own address", "Use a different port for each task on one host.", twice=twice
        )


_T = TypeVar("_T")
_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
_ADVICE = (
    "Start the program with srun, which sets all of them. To train on this machine only, unset SLURM_STEP_NUM_TASKS and "
    "SLURM_NTASKS."
)


def slurm_tasks() -> Tasks | None:
    """Return the tasks of the Slurm step that this process belongs to.

    Task n of the step is worker n. Ports are derived from the job number, so two jobs on one node use different ports.

    Returns:
        The tasks; None outside Slurm and in a step with one task.

    Raises:
        UsageError: If variables are missing, contradict each other or do not belong to a step.
    """
    number = os.environ.get("SLURM_STEP_NUM_TASKS")
    if number is None and os.environ.get("SLURM_NTASKS", "1") != "1":
        raise UsageError(
            "In a Slurm allocation of several tasks, srun must start the program",
            _ADVICE,
            SLURM_NTASKS=os.environ["SLURM_NTASKS"],
            SLURM_STEP_NUM_TASKS=None,
        )
    if number is None or number == "1":
        return None
    if missing := [name for name in _STEP if name not in os.environ]:
        raise UsageError("A Slurm step must set all variables of its tasks", _ADVICE, missing=missing)
    text = os.environ["SLURM_PROCID"]
    if not (text.isdecimal() and number.isdecimal() and int(text) < int(number)):
        raise UsageError(
            f"SLURM_PROCID must be a number from 0, below the number of tasks ({number})", _ADVICE, SLURM_PROCID=text
        )
    rank = int(text)
    # Slurm numbers tasks node by node (--distribution=block).
    job = os.environ.get("SLURM_JOB_ID", "0")
    first = 10_000 + int(job) * 16 % 20_000 if job.isdecimal() else 10_000
    addresses = [f"{node}:{first + i}" for node, tasks in _nodes().items() for i in range(tasks)]
    if len(addresses) != int(number):
        raise _counted_otherwise()
    here, node = os.environ.get("SLURMD_NODENAME"), addresses[rank].rpartition(":")[0]
    if here not in (None, node):
        raise UsageError(
            f"With tasks numbered node by node, task {text} of the step must run on node {node}",
            "Use srun --distribution=block, or pass the cluster: make_strategy(cluster=...).",
            SLURMD_NODENAME=here,
        )
    return Tasks({"worker": tuple(addresses)}, "worker", rank, "Slurm")


def own_gpus(visible: list[_T]) -> list[_T]:
    """Return this task's share of the visible GPUs. Slurm may show every GPU of a node to each task on it.

    Args:
        visible: The visible GPUs.

    Returns:
        An equal share, in the order of SLURM_LOCALID. All of them if this task sees fewer GPUs than the step has on this node.

    Raises:
        UsageError: If the GPUs cannot be shared evenly.
    """
    shows_all = bool(visible) and os.environ.get("SLURM_GPUS_ON_NODE") == str(len(visible))
    needed = ("SLURM_LOCALID", "SLURMD_NODENAME", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID")
    is_step = all(name in os.environ for name in needed)
    tasks = _nodes().get(os.environ["SLURMD_NODENAME"], 1) if shows_all and is_step else 1
    if tasks == 1:
        return visible
    if len(visible) % tasks:
        raise UsageError(
            "The tasks of a Slurm step must be able to share the GPUs of their node evenly",
            "Use srun --gpus-per-task=..., or start one task on each node.",
            gpus=len(visible),
            tasks=tasks,
        )
    text = os.environ["SLURM_LOCALID"]
    if not (text.isdecimal() and int(text) < tasks):
        raise UsageError(
            f"SLURM_LOCALID must be a number from 0 to {tasks - 1}: the node has {tasks} tasks", _ADVICE, SLURM_LOCALID=text
        )
    share, number = len(visible) // tasks, int(text)
    return visible[number * share : (number + 1) * share]


def _nodes() -> dict[str, int]:
    """Return the number of tasks on each node of the step, in Slurm's order."""
    try:
        nodes, counts = nodes_of(os.environ["SLURM_STEP_NODELIST"]), counts_of(os.environ["SLURM_STEP_TASKS_PER_NODE"])
    except ValueError as error:
        raise UsageError("The variables of a Slurm step must name its nodes and tasks", _ADVICE, error=str(error)) from error
    if not len(set(nodes)) == len(nodes) == len(counts):
        raise _counted_otherwise()
    return dict(zip(nodes, counts, strict=True))


def _counted_otherwise() -> UsageError:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    return UsageError(
        "The variables of a Slurm step must count its tasks node by node",
        _ADVICE,
        **{name: os.environ.get(name) for name in names},
    )


_NODE = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def nodes_of(text: str) -> list[str]:
    """Return the node names in a compressed list, in order.

    Args:
        text: A list such as `n[01-02]`, `r[1-2]n[1-2]` or `a[1,3-4].cluster,b`.

    Returns:
        The node names.

    Raises:
        ValueError: If the text is not a list of nodes.

    Example:
        >>> nodes_of("n[09-10]-ib,m")
        ['n09-ib', 'n10-ib', 'm']
    """
    names = _NODE.findall(text)
    if not names or ",".join(names) != text:
        raise ValueError(f"{text!r} is not a list of nodes")
    nodes = []
    for name in names:
        # Every second part is what stood in brackets; the last ones run fastest.
        parts = [_numbers_of(part) if place % 2 else [part] for place, part in enumerate(_BRACKETS.split(name))]
        nodes += ["".join(chosen) for chosen in itertools.product(*parts)]
    return nodes


def _numbers_of(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def counts_of(text: str) -> list[int]:
    """Return the number of tasks on each node.

    Args:
        text: A list such as `4(x2),3`.

    Returns:
        One number for each node.

    Raises:
        ValueError: If the text is not a list of task counts.

    Example:
        >>> counts_of("4(x2),3")
        [4, 4, 3]
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"{text!r} is not a list of tasks per node")
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def num_gpus() -> int:
    """Return the number of visible GPUs on this machine. Each logical GPU counts."""
    return len(_named("GPU"))


def show_own_gpus() -> None:
    """Hide from TensorFlow the GPUs that belong to other tasks on this node. Outside Slurm nothing is hidden."""
    import tensorflow as tf

    own = _own("GPU")
    if len(own) < len(tf.config.get_visible_devices("GPU")):
        tf.config.set_visible_devices(own, "GPU")


def shares_hardware(devices: tuple[str, ...]) -> bool:
    """Return whether two of these devices are, or may be, on one piece of hardware: CPUs, or parts of one GPU.

    Args:
        devices: Names of this machine's devices.

    Returns:
        True if NCCL would refuse these devices.
    """
    owners = _owners("GPU")
    indices = [index_of(name) for name in devices if "GPU" in name.upper()]
    used = [owners[index] for index in indices if index < len(owners)]
    return len(used) < len(devices) or len(set(used)) < len(devices)


def index_of(name: str) -> int:
    """Return the number at the end of a device name."""
    return int(name.rpartition(":")[2])


def _named(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(len(_owners(kind))))


def _owners(kind: str) -> list[str]:
    """Return the name of the physical device that holds each logical device."""
    import tensorflow as tf

    def parts(device: Any) -> int:
        return len(tf.config.get_logical_device_configuration(device) or [None])

    return [device.name for device in _own(kind) for _ in range(parts(device))]


def _own(kind: str) -> list[Any]:
    import tensorflow as tf

    load_cuda_libraries()
    visible = tf.config.get_visible_devices(kind)
    return own_gpus(visible) if kind == "GPU" else list(visible)


CUDA_DRIVER = "libcuda.so.1"


@functools.cache
def load_cuda_libraries() -> tuple[str, ...]:
    """Open the library before TensorFlow first looks for GPUs. Without an NVIDIA driver nothing happens.

    It starts nothing on a GPU, so a process may fork after it.

    Returns:
        The paths of the opened libraries.
    """
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return ()
    opened = []
    with contextlib.suppress(ImportError, ValueError):  # NVIDIA's package is not in this environment
        spec = importlib.util.find_spec("nvidia.cusolver")
        folders = (spec.submodule_search_locations if spec is not None else None) or []
        for path in sorted(path for folder in folders for path in (Path(folder) / "lib").glob("libcusolver.so.*")):
            with contextlib.suppress(OSError):  # TensorFlow itself says so, and more
                ctypes.CDLL(str(path))
                opened.append(str(path))
    return tuple(opened)
