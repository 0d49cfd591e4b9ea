"""`Cluster`: the public face."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from emulate.cluster import Cluster, Preload
from emulate.errors import Hung, ProgramFailed, UsageError
from tests.emulate.cluster.helpers import is_running, start_python, wait_until


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster("2x2") as cluster:
        yield cluster


def sum_over_all(value: float) -> float:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(value)))

    return float(strategy.experimental_local_results(step())[0])


def test_one_result_per_host_in_host_order(two: Cluster) -> None:
    def which(first: int, *, second: int) -> Any:
        import json

        return json.loads(os.environ["TF_CONFIG"])["task"]["index"], first, second

    assert two.run(which, 1, second=2) == [(0, 1, 2), (1, 1, 2)]


def test_all_devices_of_all_hosts_take_part(two: Cluster) -> None:
    assert two.run(sum_over_all, 1.5) == [6.0, 6.0]


def test_every_run_gets_fresh_hosts(two: Cluster) -> None:
    def count() -> Any:
        import tensorflow as tf

        tf.seen = getattr(tf, "seen", 0) + 1
        return os.getpid(), tf.seen

    runs = [two.run(count) for _ in range(2)]
    assert len({pid for run in runs for pid, _ in run}) == 4
    assert {seen for run in runs for _, seen in run} == {1}


def test_an_exception_on_a_host_is_raised_here_with_its_name_and_traceback(two: Cluster) -> None:
    def fail_on_one() -> None:
        import json

        print("about to fail")
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise KeyError("missing")

    with pytest.raises(ProgramFailed) as caught:
        two.run(fail_on_one)
    assert caught.value.host == 1
    assert str(caught.value).startswith(
        "A function must not raise. Received: KeyError on host 1:\nTraceback (most recent call last):"
    )
    assert 'KeyError("missing")' in caught.value.traceback_text
    assert "about to fail" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_blocked_peer_does_not_hold_up_the_error(two: Cluster) -> None:
    def fail_on_one() -> None:
        import json

        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            time.sleep(1000)
        raise RuntimeError

    with pytest.raises(ProgramFailed, match="RuntimeError on host 1"):
        two.run(fail_on_one)


def test_an_exception_that_cannot_say_itself_is_named_all_the_same(two: Cluster) -> None:
    def fail() -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise MuteError

    with pytest.raises(ProgramFailed, match=r"MuteError on host [01]:\n(.|\n)*<exception str\(\) failed>"):
        two.run(fail)


def test_a_host_that_leaves_is_an_error(two: Cluster) -> None:
    for code in (5, 0):
        with pytest.raises(ProgramFailed) as caught:
            two.run(os._exit, code)
        assert f"ended with exit code {code}." in str(caught.value)
    assert two.run(sys.exit, 0) == [None, None]


def test_a_crash_is_an_error_that_says_where_the_thread_was_that_crashed(two: Cluster) -> None:
    def crash(in_a_thread: bool) -> None:
        if not in_a_thread:
            os.abort()
        thread = threading.Thread(target=crash, args=(False,))
        thread.start()
        thread.join()

    for in_a_thread in (False, True):
        with pytest.raises(ProgramFailed) as caught:
            two.run(crash, in_a_thread)
        first, _, stack = str(caught.value).partition("\nPython's stack there:\n")
        assert "ended with signal 6." in first
        assert stack.startswith("Aborted\n  File ")
        assert stack.rstrip().endswith("os.abort()")
        assert "emulate" not in stack.replace("tests/emulate", "")


def test_a_time_limit_tells_where_each_host_was(preload: Preload) -> None:
    def sleep_for_ever() -> None:
        print("asleep", flush=True)
        time.sleep(1000)

    with Cluster("2x1", timeout=3, preload=preload) as cluster, pytest.raises(Hung) as caught:
        cluster.run(sleep_for_ever)
    assert caught.value.reason == "timeout"
    assert sorted(caught.value.stacks) == [0, 1]
    assert all("in sleep_for_ever" in stack for stack in caught.value.stacks.values())
    assert str(caught.value).startswith("A function must end in time on every host. Received: timeout=3 s, topology='2x1'.")


def test_a_function_that_sets_what_is_read_at_import_runs_in_a_fresh_process(preload: Preload) -> None:
    def use_legacy() -> Any:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        import tensorflow as tf

        return tf.keras.__name__, tf.keras.Model.__module__.partition(".")[0]

    with Cluster("1x1", preload=preload) as cluster:
        [(_, package)] = cluster.run(use_legacy)
    assert package == "tf_keras"


def test_the_environment_reaches_the_hosts_before_tensorflow_is_imported() -> None:
    def package() -> Any:
        import tensorflow as tf

        return os.environ["MINE"], tf.keras.Model.__module__.partition(".")[0]

    with Cluster("1x1", environment={"TF_USE_LEGACY_KERAS": "1", "MINE": "yes"}) as cluster:
        assert cluster.run(package) == [("yes", "tf_keras")]


def test_a_programs_own_tf_config_is_noted(two: Cluster) -> None:
    def configure() -> None:
        os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1"]}}'

    two.run(configure)
    assert any("The program sets TF_CONFIG itself" in note for note in two.notes)


def test_a_function_that_cannot_be_sent_is_refused(two: Cluster) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match="A callable and its arguments must be sendable to another process"):
        two.run(lambda: lock)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "2y2"}, r"A topology has the form HxD or HxD\+Pps\. Received: topology='2y2'"),
        ({"all_reduce": "star"}, r"all_reduce must be one of .*ring.* Received: all_reduce='star'\."),
        ({"network": "none"}, r"network must be one of own, host\. Received: network='none'\."),
        ({"timeout": 0}, r"A time limit must be a positive number\. Received: timeout=0\. Use None for no limit\."),
        ({"timeout": "x"}, r"A time limit must be a positive number\. Received: timeout='x'\."),
        ({"environment": {"A": 1}}, r"a text for each name\. Received: environment={'A': 1}\. Write it as {'A': '1'}\."),
        ({"environment": ["A"]}, r"a text for each name\. Received: environment=\['A'\]\. Give a dict of texts\."),
    ],
)
def test_wrong_use_says_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster(**{"topology": "1x1", **options})


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("train.py", {}, r"What hosts run must be callable\. Received: function='train\.py'\. Give a function;"),
        (None, {}, r"What hosts run must be callable\. Received: function=None\."),
        (len, {"faults": 3}, r"A fault must be a text, or one of emulate\.faults\. Received: faults=3\. Write 'kill:"),
        (len, {"faults": [None]}, r"A fault must be a text, or one of emulate\.faults\. Received: faults=None\."),
        (len, {"restarts": "x"}, r"A number of restarts must not be negative\. Received: restarts='x'\."),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_before_it_starts(
    two: Cluster, function: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        two.run(function, **options)


class Once:
    """What pickle takes and cannot make again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Once, ()


def test_a_result_that_cannot_be_made_again_here_is_said_to_be(two: Cluster) -> None:
    with pytest.raises(ProgramFailed) as caught:
        two.run(lambda: Once(1))
    assert caught.value.host == 0
    said = r"The process that calls a function must be able to unpickle what it returns\. Received: TypeError: .*'number', "
    assert re.fullmatch(
        rf"{said}of what host 0 returned\. Return numbers, NumPy arrays and containers of them\.", str(caught.value)
    )


def test_arguments_that_cannot_be_made_again_on_a_host_are_not_the_functions_fault(two: Cluster) -> None:
    with pytest.raises(ProgramFailed) as caught:
        two.run(lambda one: None, Once(1))
    assert str(caught.value).startswith(
        "A host must be able to unpickle a function and its arguments, as it can numbers, NumPy arrays"
    )
    assert "before it calls it. Received: TypeError on host" in str(caught.value)


def test_a_cluster_that_was_left_says_so(preload: Preload) -> None:
    with Cluster("1x1", preload=preload) as cluster:
        pass
    with pytest.raises(UsageError, match=r"inside its `with` only\. Received: topology='1x1', left\. Make a new one\."):
        cluster.run(os.getpid)


def test_parameter_servers_serve_a_coordinator(preload: Preload) -> None:
    def train() -> Any:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            server = tf.distribute.Server(
                resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
            )
            server.join()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            variable = tf.Variable(0.0)

        @tf.function
        def step() -> None:
            variable.assign_add(1.0)

        for _ in range(5):
            coordinator.schedule(step)
        coordinator.join()
        return float(variable), resolver.task_type

    with Cluster("2x1+1ps", preload=preload) as cluster:
        assert cluster.run(train) == [(5.0, "chief"), None, None, None]


def test_the_callers_process_imports_no_tensorflow() -> None:
    code = """
import sys
from emulate.cluster import Cluster
with Cluster("1x1") as cluster:
    print(cluster.run(abs, -1))
assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
"""
    process = start_python(code, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    assert (process.returncode, out.decode()) == (0, "[1]\n")


def test_ctrl_c_during_a_run_leaves_nothing() -> None:
    code = """
import sys, os, time
from emulate.cluster import Cluster
with Cluster("2x1", echo=True) as cluster:
    cluster.run(eval, "print('running', flush=True) or __import__('time').sleep(1000)")
"""
    process = start_python(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    running = [process.stdout.readline() for _ in range(2)]  # one of each host: the first is not there for both
    descendants = process.children(recursive=True)
    process.send_signal(2)
    process.communicate()
    assert process.returncode == -2
    assert all(b"running" in line for line in running)
    assert len(descendants) >= 4
    assert not any(is_running(one.pid) for one in descendants)


def test_sys_path_of_the_caller_counts_on_hosts(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/some/where")
    assert two.run(eval, "__import__('sys').path[0]") == ["/some/where"] * 2
    assert sys.path[0] == "/some/where"


def parent_of_hosts() -> tuple[int, str | None, str | None]:
    import psutil

    return psutil.Process(os.getppid()).ppid(), os.environ.get("MINE"), os.environ.get("THEIRS")


def test_clusters_of_a_process_share_one_parent_where_the_environment_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def parent(**environment: str) -> Any:
        with Cluster("1x1", environment=environment) as cluster:
            return cluster.run(parent_of_hosts)[0]

    first, *_ = parent()
    monkeypatch.setenv("MINE", "1")
    assert parent(THEIRS="2") == (first, "1", "2")
    monkeypatch.delenv("MINE")
    assert parent() == (first, None, None)
    early, *_ = parent(TF_ENABLE_ONEDNN_OPTS="0")
    assert early != first
    os.kill(early, signal.SIGKILL)
    wait_until(lambda: not is_running(early))
    assert parent(TF_ENABLE_ONEDNN_OPTS="0")[0] != early
