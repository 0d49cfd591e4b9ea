"""Describe where this program runs, and which setting decides it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpudist_core.environments.devices import local_devices
from gpudist_core.environments.slurm import slurm_tasks
from gpudist_core.environments.tasks import SHAPE, Tasks, tasks_of
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
    devices = local_devices()
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
