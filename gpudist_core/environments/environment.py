"""Where this program runs, and who says so."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpudist_core.environments.devices import local_devices
from gpudist_core.environments.slurm import slurm_tasks
from gpudist_core.environments.tasks import SHAPE, Tasks, tasks_of
from gpudist_core.errors import WrongUse


@dataclass(frozen=True)
class Environment:
    """Where a program runs.

    Attributes:
        kind: The strategy that fits: `one-device`, `mirrored`, `multi-worker` or `parameter-server`.
        num_hosts: Hosts that train; parameter servers and their chief are none.
        host: The number of this host among them; 0 for a task that does not train.
        role: What this process is: `chief`, `worker`, `ps` or `evaluator`; `worker` on one host.
        devices: This host's devices, `GPU:0` for example.
        source: Who says so: `TF_CONFIG`, `Slurm`, `the cluster given` or `this machine`.
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
    """Where this program runs: one device, the GPUs of this machine, or a cluster; TensorFlow's runtime is not started.

    Args:
        cluster: What `make_strategy` takes as `cluster`; None to look at TF_CONFIG, then at Slurm, then at this machine.

    Returns:
        What `make_strategy()` goes by.

    Raises:
        WrongUse: When TF_CONFIG, Slurm's variables or the cluster given cannot be meant.

    Example:
        >>> import gpudist_core as gd
        >>> print(gd.environment())
        one-device: worker, 1 host, 1 device (...PU:0), says this machine
    """
    tasks = find_tasks(cluster)
    devices = local_devices()
    if tasks is None or not tasks.trains:
        kind = "mirrored" if len(devices) > 1 else "one-device"
        role, source = (tasks.role, tasks.source) if tasks else ("worker", "this machine")
        return Environment(kind, 1, 0, role, devices, source)
    kind = "parameter-server" if tasks.has_servers else "multi-worker"
    return Environment(kind, tasks.num_hosts, tasks.host, tasks.role, devices, tasks.source)


def find_tasks(cluster: Any = None) -> Tasks | None:
    """The cluster this process is in: the one given, that of TF_CONFIG, or the Slurm step.

    Args:
        cluster: A cluster resolver, a `tf.train.ClusterSpec` (TF_CONFIG then says which task this is), a dictionary like
            TF_CONFIG, or None.

    Returns:
        None on one machine that nobody said anything about.

    Raises:
        WrongUse: When it cannot be meant.
    """
    if cluster is not None:
        return _given(cluster)
    return tasks_of(tf_config(), "TF_CONFIG") or slurm_tasks()


def tf_config() -> Mapping[str, Any]:
    """What TF_CONFIG holds.

    Returns:
        Its object, empty when it is not set.

    Raises:
        WrongUse: When it is not a JSON object.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise WrongUse("TF_CONFIG is JSON", f"It cannot be read: {error}.", TF_CONFIG=_short(text)) from error
    if not isinstance(config, dict):
        raise WrongUse("TF_CONFIG is a JSON object", "Write one with a cluster and a task.", TF_CONFIG=_short(text))
    return config


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _given(cluster: Any) -> Tasks | None:
    import tensorflow as tf

    source = "the cluster given"
    if isinstance(cluster, Mapping):
        if not cluster.keys() & {"cluster", "task"}:
            raise WrongUse(f"{source.capitalize()} has a cluster and a task, as TF_CONFIG has", SHAPE, cluster=cluster)
        return tasks_of(cluster, source)
    if isinstance(cluster, tf.train.ClusterSpec):
        return tasks_of({"cluster": cluster.as_dict(), "task": tf_config().get("task")}, source)
    if not isinstance(cluster, tf.distribute.cluster_resolver.ClusterResolver):
        raise WrongUse(
            "A cluster is a cluster resolver, a tf.train.ClusterSpec or a dictionary like TF_CONFIG",
            "Pass one.",
            cluster=cluster,
        )
    jobs = cluster.cluster_spec().as_dict()  # first: Slurm's resolver knows its task only afterwards
    task = {} if cluster.task_type is None else {"type": cluster.task_type, "index": cluster.task_id or 0}
    return tasks_of({"cluster": jobs, "task": task}, source) if jobs else None
