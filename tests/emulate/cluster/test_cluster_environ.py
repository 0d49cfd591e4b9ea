"""A program's own TF_CONFIG is replaced by the topology's; variables that come too late are noticed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from emulate.cluster import HostContext, Preload, RunningCluster
from emulate.cluster.environ import is_read_at_import
from tests.emulate.cluster.helpers import Ran, events_until

Run = Callable[..., Ran]
Launch = Callable[..., RunningCluster]
THEIRS = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})


def assign(value: str) -> None:
    os.environ["TF_CONFIG"] = value


def update(value: str) -> None:
    os.environ.update(TF_CONFIG=value)


def merge(value: str) -> None:
    os.environ |= {"TF_CONFIG": value}


def remove_and_set_default(value: str) -> None:
    os.environ.pop("TF_CONFIG", None)
    os.environ.setdefault("TF_CONFIG", value)


def put(value: str) -> None:
    os.putenv("TF_CONFIG", value)


def replace_all(value: str) -> None:
    os.environ = {**os.environ, "TF_CONFIG": value}  # type: ignore[assignment]  # noqa: B003


def replace_then_assign(value: str) -> None:
    os.environ = dict(os.environ)  # type: ignore[assignment]  # noqa: B003
    os.environ["TF_CONFIG"] = value


def clear_and_assign(value: str) -> None:
    path = os.environ["PATH"]
    os.environ.clear()
    os.environ["PATH"] = path
    os.environ["TF_CONFIG"] = value


def seen_here_and_by_children() -> tuple[str | None, str]:
    child = subprocess.run(["printenv", "TF_CONFIG"], capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("TF_CONFIG"), child


WAYS = [assign, update, merge, remove_and_set_default, put, replace_all, replace_then_assign, clear_and_assign]


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
def test_however_a_program_writes_tf_config_it_gets_the_topologys(run: Run, write: Callable[[str], None]) -> None:
    def entry(context: HostContext) -> Any:
        right = os.environ["TF_CONFIG"]
        write(THEIRS)
        return right, *seen_here_and_by_children()

    ran = run("2x1", entry)
    for right, seen, child in ran.values:
        assert seen == child == right
        assert len(json.loads(right)["cluster"]["worker"]) == 2
    notes = [note["text"] for note in ran.sent("note") if note["code"] == "tf-config"]
    assert any("each host got the topology's" in note or "each host kept the topology's" in note for note in notes)


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
def test_on_one_host_a_programs_tf_config_becomes_that_of_one_worker(run: Run, write: Callable[[str], None]) -> None:
    def entry(context: HostContext) -> Any:
        write(THEIRS)
        return seen_here_and_by_children()

    ran = run("1x2", entry)
    [(seen, child)] = ran.values
    assert len(json.loads(seen or child)["cluster"]["worker"]) == 1
    assert "each host got the topology's" in ran.sent("note")[0]["text"]


def test_on_one_host_a_program_may_say_that_there_is_no_cluster(run: Run) -> None:
    def entry(context: HostContext) -> Any:
        os.environ["TF_CONFIG"] = "{}"
        first = os.environ["TF_CONFIG"]
        del os.environ["TF_CONFIG"]
        return first, os.environ.get("TF_CONFIG")

    ran = run("1x2", entry)
    assert ran.values == [("{}", None)]
    assert ran.sent("note") == []


def test_a_program_that_writes_what_is_there_gets_no_note(run: Run) -> None:
    def entry(context: HostContext) -> None:
        os.environ["TF_CONFIG"] = os.environ["TF_CONFIG"]

    assert run("2x1", entry).sent("note") == []


def test_other_variables_behave_as_ever(run: Run) -> None:
    def entry(context: HostContext) -> Any:
        os.environ["ONE"] = "1"
        os.environ["TWO"] = "2"
        del os.environ["TWO"]
        gone = os.environ.pop("THREE", "default")
        with pytest_raises_type_error():
            os.environ["FOUR"] = 4  # type: ignore[assignment]
        return os.environ["ONE"], "TWO" in os.environ, gone, subprocess.check_output(["printenv", "ONE"], text=True).strip()

    def pytest_raises_type_error() -> Any:
        import contextlib

        return contextlib.suppress(TypeError)

    assert run("2x1", entry).values[0] == ("1", False, "default", "1")


def parked_on(launch: Launch, preload: Preload, entry: Callable[[HostContext], None]) -> list[str]:
    with launch("1x1", entry, preload=preload) as cluster:
        events = events_until(
            cluster, lambda seen: cluster.is_over or any(e["event"] == "needs-fresh-process" for _, e in seen)
        )
    return [event["name"] for _, event in events if event["event"] == "needs-fresh-process"]


def set_variable(name: str, value: str) -> Callable[[HostContext], None]:
    def entry(context: HostContext) -> None:
        os.environ[name] = value

    return entry


def test_a_variable_that_the_imported_tensorflow_has_read_needs_a_fresh_process(launch: Launch, preload: Preload) -> None:
    assert parked_on(launch, preload, set_variable("TF_USE_LEGACY_KERAS", "1")) == ["TF_USE_LEGACY_KERAS"]


def test_a_process_that_has_not_imported_tensorflow_takes_the_variable(launch: Launch, bare: Preload) -> None:
    assert parked_on(launch, bare, set_variable("TF_USE_LEGACY_KERAS", "1")) == []


def test_what_tensorflow_itself_writes_needs_no_fresh_process(launch: Launch, preload: Preload) -> None:
    def entry(context: HostContext) -> None:
        code = "import os; os.environ['TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE'] = os.environ.setdefault('TF_SOME', 'False')"
        exec(code, {"__name__": "tensorflow.python.distribute.parameter_server_strategy_v2"})

    assert parked_on(launch, preload, entry) == []


def test_after_the_runtime_is_there_a_variable_is_in_vain_in_any_process(launch: Launch, preload: Preload) -> None:
    def entry(context: HostContext) -> None:
        import tensorflow as tf

        tf.ones([])
        os.environ["TF_USE_LEGACY_KERAS"] = "1"

    assert parked_on(launch, preload, entry) == []


@pytest.mark.parametrize(
    "name", ["TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "TF_DETERMINISTIC_OPS", "HOME", "TF_GPU_ALLOCATOR"]
)
def test_what_is_read_later_needs_no_fresh_process(name: str) -> None:
    assert not is_read_at_import(name)


@pytest.mark.parametrize(
    "name", ["KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "XLA_FLAGS", "OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS"]
)
def test_what_is_read_at_import_does(name: str) -> None:
    assert is_read_at_import(name)
