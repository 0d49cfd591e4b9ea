"""The tasks of a cluster: which there are, at which addresses, and which of them this process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpudist_core.errors import WrongUse

ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class Tasks:
    """The tasks of a cluster, seen by one of them.

    Attributes:
        jobs: The addresses (`host:port`) of the tasks of each job.
        role: The job of this process.
        index: Its number in that job.
        source: Who said so: `TF_CONFIG`, `Slurm`, or `the cluster given`.
    """

    jobs: Mapping[str, tuple[str, ...]]
    role: str
    index: int
    source: str

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""
        return bool(self.jobs.get("ps"))

    @property
    def trains(self) -> bool:
        """Whether this task takes part in the training of several hosts; an evaluator stands beside it."""
        return self.role != "evaluator" and (self.has_servers or self.num_hosts > 1)

    @property
    def num_hosts(self) -> int:
        """The hosts that train: the chief, if it has no parameter servers to command, and the workers."""
        if self.role == "evaluator":
            return 1
        return len(self.jobs.get("worker", ())) + (0 if self.has_servers else len(self.jobs.get("chief", ())))

    @property
    def host(self) -> int:
        """The number of this host among those that train; 0 for what does not train."""
        if self.role != "worker":
            return 0
        return self.index + (0 if self.has_servers else len(self.jobs.get("chief", ())))

    @property
    def address(self) -> str | None:
        """Where this task listens; None for an evaluator outside the cluster."""
        addresses = self.jobs.get(self.role, ())
        return addresses[self.index] if self.index < len(addresses) else None

    @property
    def leader(self) -> str | None:
        """The peer that coordinates the training, by name; None when it is this task."""
        leader = "chief 0" if self.jobs.get("chief") else "worker 0"
        return None if leader == f"{self.role} {self.index}" else leader

    @property
    def peers(self) -> dict[str, str]:
        """The other tasks that take part in the training, `worker 1` for example, and their addresses."""
        return {
            f"{job} {i}": address
            for job in ("chief", "worker", "ps")
            for i, address in enumerate(self.jobs.get(job, ()))
            if (job, i) != (self.role, self.index)
        }


def tasks_of(config: Mapping[str, Any], source: str) -> Tasks | None:
    """Read what TF_CONFIG means.

    Args:
        config: `{"cluster": {job: [address, ...]}, "task": {"type": job, "index": number}}`.
        source: Who said so, for messages.

    Returns:
        The tasks; None where there is neither a cluster nor a task.

    Raises:
        WrongUse: When it cannot be meant.
    """
    if not config.get("cluster") and not config.get("task"):
        return None
    jobs = _jobs(config.get("cluster"), source)
    role, index = _task(config.get("task"), source)
    if role not in jobs and role != "evaluator":
        raise WrongUse(
            f"The task type of {source} is a job of its cluster", "Name one of its jobs.", type=role, cluster=list(jobs)
        )
    number = len(jobs.get(role, ())) or index + 1
    if not 0 <= index < number:
        raise WrongUse(
            f"The task index of {source} counts the tasks of its job from 0",
            f"The job {role} has {number}: {role} 0 to {role} {number - 1}.",
            index=index,
        )
    return Tasks(jobs, role, index, source)


def _jobs(cluster: Any, source: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, Mapping) or not all(isinstance(tasks, (list, tuple)) for tasks in cluster.values()):
        raise WrongUse(f"The cluster of {source} has a list of addresses for each job", SHAPE, cluster=cluster)
    jobs = {str(job): tuple(map(str, tasks)) for job, tasks in cluster.items() if tasks}
    if unknown := sorted(set(jobs) - set(ROLES)):
        raise WrongUse(f"The jobs of {source} are among {', '.join(ROLES)}", "Rename or remove the others.", jobs=unknown)
    if not jobs.get("worker") and not jobs.get("chief"):
        raise WrongUse(f"The cluster of {source} has a worker or a chief", "Add the task that trains.", jobs=list(jobs))
    if jobs.get("ps") and not jobs.get("worker"):
        raise WrongUse(f"Parameter servers of {source} have workers", "Add a worker, or remove ps.", jobs=list(jobs))
    if len(jobs.get("chief", ())) > 1:
        raise WrongUse(f"The cluster of {source} has one chief", "Make the others workers.", chief=jobs["chief"])
    _check_addresses([address for addresses in jobs.values() for address in addresses], source)
    return jobs


SHAPE = 'Write {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'


def _task(task: Any, source: str) -> tuple[str, int]:
    if not isinstance(task, Mapping) or "type" not in task or "index" not in task:
        raise WrongUse(f"The task of {source} has a type and an index", SHAPE, task=task)
    role, index = str(task["type"]), str(task["index"])
    if role not in ROLES:
        raise WrongUse(f"The task type of {source} is one of {', '.join(ROLES)}", "Name one of these.", type=role)
    if not index.removeprefix("-").isdecimal():
        raise WrongUse(f"The task index of {source} is a whole number", "Count from 0.", index=task["index"])
    return role, int(index)


def _check_addresses(addresses: list[str], source: str) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise WrongUse(f"An address of {source} is host:port", "Write both.", address=address)
    if twice := sorted({a for a in addresses if addresses.count(a) > 1}):
        raise WrongUse(
            f"Each task of {source} has an address of its own", "Give the tasks of one host ports of their own.", twice=twice
        )
