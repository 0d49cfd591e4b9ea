"""What TF_CONFIG means, and what is said of one that cannot be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudist_core.environments import tasks_of, tf_config
from gpudist_core.errors import UsageError

_TWO = {"worker": ["a:1", "b:2"]}
_SHAPE = 'Write {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'


def _config(cluster: Any, role: Any = "worker", index: Any = 0) -> dict[str, Any]:
    return {"cluster": cluster, "task": {"type": role, "index": index}}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"task": {"type": "worker", "index": 0}},
            f"The cluster of TF_CONFIG must have a list of addresses for each job. Received: cluster=None. {_SHAPE}",
        ),
        (
            _config({"worker": "a:1"}),
            (
                f"The cluster of TF_CONFIG must have a list of addresses for each job. Received: cluster={{'worker': 'a:1'}}. "
                f"{_SHAPE}"
            ),
        ),
        ({"cluster": _TWO}, f"The task of TF_CONFIG must have a type and an index. Received: task=None. {_SHAPE}"),
        (
            _config({"worker": ["a:1"], "boss": ["b:1"]}),
            (
                "The jobs of TF_CONFIG must be among chief, worker, ps, evaluator. Received: jobs=['boss']. Rename or remove "
                "the others."
            ),
        ),
        (
            _config({"evaluator": ["a:1"]}),
            "The cluster of TF_CONFIG must have a worker or a chief. Received: jobs=['evaluator']. Add the task that trains.",
        ),
        (
            _config({"chief": ["a:1"], "ps": ["b:1"]}),
            (
                "A cluster with parameter servers in TF_CONFIG must have workers. Received: jobs=['chief', 'ps']. Add a "
                "worker, or remove ps."
            ),
        ),
        (
            _config({"chief": ["a:1", "b:1"]}),
            "The cluster of TF_CONFIG must have at most one chief. Received: chief=('a:1', 'b:1'). Make the others workers.",
        ),
        (
            _config(_TWO, "master"),
            "The task type of TF_CONFIG must be one of chief, worker, ps, evaluator. Received: type='master'.",
        ),
        (
            _config(_TWO, "ps"),
            (
                "The task type of TF_CONFIG must be a job of its cluster. Received: type='ps', cluster=['worker']. Name one "
                "of its jobs."
            ),
        ),
        (
            _config(_TWO, index=2),
            (
                "The task index of TF_CONFIG must be the number of a task of its job, counted from 0. Received: index=2. The "
                "job worker has tasks worker 0 to worker 1."
            ),
        ),
        (
            _config(_TWO, index=-1),
            (
                "The task index of TF_CONFIG must be the number of a task of its job, counted from 0. Received: index=-1. "
                "The job worker has tasks worker 0 to worker 1."
            ),
        ),
        (_config(_TWO, index="x"), "The task index of TF_CONFIG must be an integer. Received: index='x'. Count from 0."),
        (_config({"worker": ["a"]}), "An address of TF_CONFIG must be host:port. Received: address='a'."),
        (_config({"worker": ["a:70000"]}), "An address of TF_CONFIG must be host:port. Received: address='a:70000'."),
        (
            _config({"worker": ["a:1", "a:1"]}),
            (
                "Each task of TF_CONFIG must have its own address. Received: twice=['a:1']. Use a different port for each "
                "task on one host."
            ),
        ),
    ],
)
def test_a_cluster_that_cannot_be_meant_is_refused_with_what_is_wrong(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as raised:
        tasks_of(config, "TF_CONFIG")
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{", "TF_CONFIG must be JSON. Received: TF_CONFIG='{'. Parse error: "),
        (
            "[1]",
            (
                "TF_CONFIG must be a JSON object. Received: TF_CONFIG='[1]'. Set a JSON object with a cluster and a task, or "
                "unset TF_CONFIG."
            ),
        ),
    ],
)
def test_a_tf_config_that_is_no_json_object_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(UsageError) as raised:
        tf_config()
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("value", [{}, {"environment": "cloud"}, {"cluster": {}, "task": {}}])
def test_a_tf_config_without_cluster_and_task_says_nothing(value: dict[str, Any]) -> None:
    assert tasks_of(value, "TF_CONFIG") is None


@given(chief=st.booleans(), workers=st.integers(0, 4), servers=st.integers(0, 3), data=st.data())
def test_every_task_finds_its_place_among_the_others(chief: bool, workers: int, servers: int, data: st.DataObject) -> None:
    jobs = {
        "chief": ["c:1"] * chief,
        "worker": [f"w{i}:1" for i in range(workers)],
        "ps": [f"p{i}:1" for i in range(servers)],
    }
    if not (workers or (chief and not servers)):
        return
    role = data.draw(st.sampled_from([job for job, addresses in jobs.items() if addresses]))
    index = data.draw(st.integers(0, len(jobs[role]) - 1))
    tasks = tasks_of(json.loads(json.dumps(_config(jobs, role, index))), "TF_CONFIG")
    assert tasks is not None
    assert tasks.address == jobs[role][index]
    assert {tasks.address, *tasks.peers.values()} == {address for addresses in jobs.values() for address in addresses}
    assert tasks.num_hosts == workers + (chief and not servers)
    assert 0 <= tasks.host < tasks.num_hosts
    assert tasks.trains == (servers > 0 or tasks.num_hosts > 1)
    assert tasks.leader is None or tasks.leader in tasks.peers


def test_workers_come_after_the_chief_where_it_trains_with_them() -> None:
    together = tasks_of(_config({"chief": ["c:1"], "worker": ["w:1"]}, "worker", 0), "TF_CONFIG")
    commanded = tasks_of(_config({"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}, "worker", 0), "TF_CONFIG")
    assert together
    assert commanded
    assert (together.host, together.num_hosts, together.leader) == (1, 2, "chief 0")
    assert (commanded.host, commanded.num_hosts) == (0, 1)


def test_an_evaluator_stands_beside_the_cluster() -> None:
    tasks = tasks_of(_config(_TWO, "evaluator"), "TF_CONFIG")
    assert tasks
    assert not tasks.trains
    assert (tasks.host, tasks.num_hosts, tasks.address) == (0, 1, None)
