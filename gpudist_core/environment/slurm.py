"""The cluster that a Slurm step (`srun`) is: its variables read by TensorFlow's resolver."""

from __future__ import annotations

import os

from gpudist_core.environment.tasks import Tasks
from gpudist_core.errors import WrongUse
from gpudist_core.upstream.strategies import slurm_tasks_per_node

_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
_ADVICE = "Start the program by srun, which sets them all, or unset SLURM_STEP_NUM_TASKS and SLURM_NTASKS to train on this machine alone."


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
    rank, addresses = _rank(), _addresses()
    if len(addresses) != int(number) or rank >= len(addresses):
        raise WrongUse(
            "The tasks of a Slurm step are those on its nodes", _ADVICE, **{name: os.environ[name] for name in _STEP}
        )
    _check_node(addresses[rank])
    return Tasks({"worker": tuple(addresses)}, "worker", rank, "Slurm")


def _refuse_without_step() -> None:
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        raise WrongUse(
            "A Slurm allocation of several tasks trains on all of them when srun starts the program",
            _ADVICE,
            SLURM_NTASKS=os.environ["SLURM_NTASKS"],
            SLURM_STEP_NUM_TASKS=None,
        )


def _rank() -> int:
    text = os.environ["SLURM_PROCID"]
    if not text.isdigit():
        raise WrongUse("SLURM_PROCID is the number of this task", _ADVICE, SLURM_PROCID=text)
    return int(text)


def _addresses() -> list[str]:
    """One for each task: Slurm gives out ranks node by node (--distribution=block)."""
    try:
        nodes = slurm_tasks_per_node()
    except (RuntimeError, ValueError) as error:
        raise WrongUse("TensorFlow's resolver reads the variables of a Slurm step", _ADVICE, error=str(error)) from error
    first = _first_port()
    return [f"{node}:{first + i}" for node, tasks in nodes.items() for i in range(tasks)]


def _first_port() -> int:
    job = os.environ.get("SLURM_JOB_ID", "0")
    return 10_000 + int(job) * 16 % 20_000 if job.isdigit() else 10_000


def _check_node(address: str) -> None:
    here = os.environ.get("SLURMD_NODENAME")
    node = address.rpartition(":")[0]
    if here is not None and here != node:
        raise WrongUse(
            f"Task {os.environ['SLURM_PROCID']} of the step is on node {node} when Slurm gives out tasks node by node",
            "Start by srun --distribution=block, or give the cluster: make_strategy(cluster=...).",
            SLURMD_NODENAME=here,
        )
