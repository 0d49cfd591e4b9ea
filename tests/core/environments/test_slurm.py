"""A Slurm step is read from its variables; one that is half set is refused."""

from __future__ import annotations

import os

import pytest

from gpudist_core.environments import nodes_of, own_gpus, slurm_tasks
from gpudist_core.errors import UsageError

_STEP = {
    "SLURM_JOB_ID": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n10",
}
_ADVICE = (
    "Start the program with srun, which sets all of them. To train on this machine only, unset SLURM_STEP_NUM_TASKS and "
    "SLURM_NTASKS."
)


@pytest.fixture(autouse=True)
def _no_step_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    for name, value in {**_STEP, **changed}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_the_tasks_of_a_step_are_workers_in_the_order_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch)
    tasks = slurm_tasks()
    assert tasks
    assert tasks.jobs == {"worker": ("n2:10048", "n2:10049", "n10:10048")}
    assert (tasks.role, tasks.index, tasks.source) == ("worker", 2, "Slurm")


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[098-101],m-7", ["n098", "n099", "n100", "n101", "m-7"]),
        ("gpu-a[1,3-4]-ib0", ["gpu-a1-ib0", "gpu-a3-ib0", "gpu-a4-ib0"]),
        ("n[1-2].cluster.org", ["n1.cluster.org", "n2.cluster.org"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
    ],
)
def test_nodes_are_read_in_every_form_that_slurm_writes(text: str, nodes: list[str]) -> None:
    assert nodes_of(text) == nodes


@pytest.mark.parametrize("text", ["", ",", "n1,", "n[1", "n1]", "n[]", "n[a]", "n[1-]", "n 1", "n[1-2,[3]]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of"):
        nodes_of(text)


def test_two_jobs_on_one_node_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = set()
    for job in range(1, 9):
        _set(monkeypatch, SLURM_JOB_ID=str(job))
        tasks = slurm_tasks()
        assert tasks
        addresses.update(tasks.jobs["worker"])
    assert len(addresses) == 8 * 3


def test_outside_slurm_and_in_a_step_of_one_task_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_tasks() is None
    _set(monkeypatch, SLURM_STEP_NUM_TASKS="1")
    assert slurm_tasks() is None


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"SLURM_PROCID": None, "SLURM_STEP_NODELIST": None},
            "A Slurm step must set all variables of its tasks. Received: missing=['SLURM_PROCID', 'SLURM_STEP_NODELIST']. "
            + _ADVICE,
        ),
        (
            {"SLURM_STEP_NUM_TASKS": None},
            "In a Slurm allocation of several tasks, srun must start the program. Received: SLURM_NTASKS='3', "
            "SLURM_STEP_NUM_TASKS=None. " + _ADVICE,
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            "The variables of a Slurm step must count its tasks node by node. Received: SLURM_STEP_NUM_TASKS='4', "
            "SLURM_STEP_NODELIST='n[2,10]', SLURM_STEP_TASKS_PER_NODE='2,1'. " + _ADVICE,
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "3"},
            "The variables of a Slurm step must count its tasks node by node. Received: SLURM_STEP_NUM_TASKS='3', "
            "SLURM_STEP_NODELIST='n[2,10]', SLURM_STEP_TASKS_PER_NODE='3'. " + _ADVICE,
        ),
        (
            {"SLURM_STEP_NODELIST": "n[2"},
            "The variables of a Slurm step must name its nodes and tasks. Received: error=\"'n[2' is not a list of nodes\". "
            + _ADVICE,
        ),
        (
            {"SLURM_PROCID": "x"},
            "SLURM_PROCID must be a number from 0, below the number of tasks (3). Received: SLURM_PROCID='x'. " + _ADVICE,
        ),
        (
            {"SLURM_PROCID": "3"},
            "SLURM_PROCID must be a number from 0, below the number of tasks (3). Received: SLURM_PROCID='3'. " + _ADVICE,
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "two"},
            "The variables of a Slurm step must name its nodes and tasks. Received: error=\"'two' is not a list of tasks per "
            'node". ' + _ADVICE,
        ),
        (
            {"SLURMD_NODENAME": "n2"},
            (
                "With tasks numbered node by node, task 2 of the step must run on node n10. Received: SLURMD_NODENAME='n2'. "
                "Use srun --distribution=block, or pass the cluster: make_strategy(cluster=...)."
            ),
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], text: str
) -> None:
    _set(monkeypatch, **changed)
    with pytest.raises(UsageError) as raised:
        slurm_tasks()
    assert str(raised.value) == text


def test_tasks_that_see_all_gpus_of_their_node_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["a", "b", "c", "d"]
    assert own_gpus(gpus) == gpus
    _set(monkeypatch, SLURM_PROCID="1", SLURM_LOCALID="1", SLURMD_NODENAME="n2", SLURM_GPUS_ON_NODE="4")
    assert own_gpus(gpus) == ["c", "d"]
    assert own_gpus(["a"]) == ["a"], "Slurm shows this task its own already"
    for number in ("2", "x"):
        monkeypatch.setenv("SLURM_LOCALID", number)
        with pytest.raises(
            UsageError, match=f"SLURM_LOCALID must be a number from 0 to 1: the node has 2 tasks. .*LOCALID='{number}'"
        ):
            own_gpus(gpus)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "3")
    with pytest.raises(UsageError) as raised:
        own_gpus(gpus[:3])
    assert str(raised.value) == (
        "The tasks of a Slurm step must be able to share the GPUs of their node evenly. Received: gpus=3, tasks=2. Use srun "
        "--gpus-per-task=..., or start one task on each node."
    )
