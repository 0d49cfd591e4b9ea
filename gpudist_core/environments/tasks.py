"""Describe the tasks of a cluster, their addresses, and which task this process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpudist_core.errors import UsageError

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
