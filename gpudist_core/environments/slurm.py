"""The cluster that a Slurm step (`srun`) is, as its variables tell."""

from __future__ import annotations

import os
from typing import TypeVar

from gpudist_core.environments.nodes import counts_of, nodes_of
from gpudist_core.environments.tasks import Tasks
from gpudist_core.errors import WrongUse

_T = TypeVar("_T")
_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
_ADVICE = (
    "Start the program by srun, which sets them all, or unset SLURM_STEP_NUM_TASKS and SLURM_NTASKS to train on this machine "
    "alone."
)


def slurm_tasks() -> Tasks | None:
    """The tasks of the Slurm step that this process belongs to.

    Task number n of the step is worker n. Ports are derived from the job's number, so that two jobs on one node differ.

    Returns:
        None outside Slurm and in a step of one task.

    Raises:
        WrongUse: When the variables are half set, contradict each other or are not those of a step.
    """
    number = os.environ.get("SLURM_STEP_NUM_TASKS")
    if number is None:
        _refuse_without_step()
        return None
    if number == "1":
        return None
    if missing := [name for name in _STEP if name not in os.environ]:
        raise WrongUse("A Slurm step says all about its tasks", _ADVICE, missing=missing)
    rank = _rank(number)
    addresses = _addresses()
    if len(addresses) != int(number):
        raise _counted_otherwise()
    _check_node(addresses[rank])
    return Tasks({"worker": tuple(addresses)}, "worker", rank, "Slurm")


def own_gpus(visible: list[_T]) -> list[_T]:
    """This task's share of the GPUs it sees, where Slurm shows all GPUs of a node to each of the tasks on it.

    Args:
        visible: The visible GPUs.

    Returns:
        As many for each task, in the order of SLURM_LOCALID; all where this task sees fewer than its step has on this node.

    Raises:
        WrongUse: When they cannot be shared evenly.
    """
    tasks = _tasks_here() if visible and os.environ.get("SLURM_GPUS_ON_NODE") == str(len(visible)) else 1
    if len(visible) % tasks:
        raise WrongUse(
            "The tasks of a Slurm step share the GPUs of their node evenly",
            "Start by srun --gpus-per-task=..., or one task on each node.",
            gpus=len(visible),
            tasks=tasks,
        )
    share, number = len(visible) // tasks, _local_number(tasks) if tasks > 1 else 0
    return visible[number * share : (number + 1) * share]


def _tasks_here() -> int:
    names = ("SLURM_LOCALID", "SLURMD_NODENAME", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID")
    if any(name not in os.environ for name in names):
        return 1
    return _nodes().get(os.environ["SLURMD_NODENAME"], 1)


def _local_number(tasks: int) -> int:
    text = os.environ["SLURM_LOCALID"]
    if not (text.isdecimal() and int(text) < tasks):
        raise WrongUse(f"SLURM_LOCALID counts the {tasks} tasks of its node from 0", _ADVICE, SLURM_LOCALID=text)
    return int(text)


def _refuse_without_step() -> None:
    if os.environ.get("SLURM_NTASKS", "1") != "1":
        raise WrongUse(
            "A Slurm allocation of several tasks trains on all of them when srun starts the program",
            _ADVICE,
            SLURM_NTASKS=os.environ["SLURM_NTASKS"],
            SLURM_STEP_NUM_TASKS=None,
        )


def _rank(number: str) -> int:
    text = os.environ["SLURM_PROCID"]
    if not (text.isdecimal() and number.isdecimal() and int(text) < int(number)):
        raise WrongUse(f"SLURM_PROCID counts the {number} tasks of the step from 0", _ADVICE, SLURM_PROCID=text)
    return int(text)


def _addresses() -> list[str]:
    """One for each task: Slurm gives out ranks node by node (--distribution=block)."""
    first = _first_port()
    return [f"{node}:{first + i}" for node, tasks in _nodes().items() for i in range(tasks)]


def _nodes() -> dict[str, int]:
    """The tasks on each node of the step, in Slurm's order."""
    try:
        nodes, counts = nodes_of(os.environ["SLURM_STEP_NODELIST"]), counts_of(os.environ["SLURM_STEP_TASKS_PER_NODE"])
    except ValueError as error:
        raise WrongUse("The variables of a Slurm step name its nodes and tasks", _ADVICE, error=str(error)) from error
    if not len(set(nodes)) == len(nodes) == len(counts):
        raise _counted_otherwise()
    return dict(zip(nodes, counts, strict=True))


def _counted_otherwise() -> WrongUse:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    return WrongUse(
        "The variables of a Slurm step count its tasks node by node", _ADVICE, **{name: os.environ.get(name) for name in names}
    )


def _first_port() -> int:
    job = os.environ.get("SLURM_JOB_ID", "0")
    return 10_000 + int(job) * 16 % 20_000 if job.isdecimal() else 10_000


def _check_node(address: str) -> None:
    here = os.environ.get("SLURMD_NODENAME")
    node = address.rpartition(":")[0]
    if here is not None and here != node:
        raise WrongUse(
            f"Task {os.environ['SLURM_PROCID']} of the step is on node {node} when Slurm gives out tasks node by node",
            "Start by srun --distribution=block, or give the cluster: make_strategy(cluster=...).",
            SLURMD_NODENAME=here,
        )
