"""Read the cluster of a Slurm step (`srun`) from its environment variables.

Some have compressed lists: nodes (`n[01-03,7]-ib,m5`) and tasks per node (`4(x2),3`). TensorFlow's resolver (2.21) reads names
that end with their brackets alone, and zips nodes and counts of different length.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import TypeVar

from gpudist_core.environments.tasks import Tasks
from gpudist_core.errors import UsageError

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
    if number is None:
        _refuse_without_step()
        return None
    if number == "1":
        return None
    if missing := [name for name in _STEP if name not in os.environ]:
        raise UsageError("A Slurm step must set all variables of its tasks", _ADVICE, missing=missing)
    rank = _rank(number)
    # Slurm numbers tasks node by node (--distribution=block).
    job = os.environ.get("SLURM_JOB_ID", "0")
    first = 10_000 + int(job) * 16 % 20_000 if job.isdecimal() else 10_000
    addresses = [f"{node}:{first + i}" for node, tasks in _nodes().items() for i in range(tasks)]
    if len(addresses) != int(number):
        raise _counted_otherwise()
    _check_node(addresses[rank])
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
    tasks = _tasks_here() if visible and os.environ.get("SLURM_GPUS_ON_NODE") == str(len(visible)) else 1
    if len(visible) % tasks:
        raise UsageError(
            "The tasks of a Slurm step must be able to share the GPUs of their node evenly",
            "Use srun --gpus-per-task=..., or start one task on each node.",
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
        raise UsageError(
            f"SLURM_LOCALID must be a number from 0 to {tasks - 1}: the node has {tasks} tasks", _ADVICE, SLURM_LOCALID=text
        )
    return int(text)


def _refuse_without_step() -> None:
    if os.environ.get("SLURM_NTASKS", "1") != "1":
        raise UsageError(
            "In a Slurm allocation of several tasks, srun must start the program",
            _ADVICE,
            SLURM_NTASKS=os.environ["SLURM_NTASKS"],
            SLURM_STEP_NUM_TASKS=None,
        )


def _rank(number: str) -> int:
    text = os.environ["SLURM_PROCID"]
    if not (text.isdecimal() and number.isdecimal() and int(text) < int(number)):
        raise UsageError(
            f"SLURM_PROCID must be a number from 0, below the number of tasks ({number})", _ADVICE, SLURM_PROCID=text
        )
    return int(text)


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


def _check_node(address: str) -> None:
    here = os.environ.get("SLURMD_NODENAME")
    node = address.rpartition(":")[0]
    if here is not None and here != node:
        raise UsageError(
            f"With tasks numbered node by node, task {os.environ['SLURM_PROCID']} of the step must run on node {node}",
            "Use srun --distribution=block, or pass the cluster: make_strategy(cluster=...).",
            SLURMD_NODENAME=here,
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
    return [node for name in names for node in _expanded(name)]


def _expanded(name: str) -> list[str]:
    # Every second part is what stood in brackets; the last ones run fastest.
    parts = [_numbers_of(part) if place % 2 else [part] for place, part in enumerate(_BRACKETS.split(name))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


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
