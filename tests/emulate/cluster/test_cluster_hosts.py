"""What a host is told, what it may do, and how its end is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import HostContext, Preload, RunningCluster
from tests.emulate.cluster.helpers import Ran, events_until, wait_until

Run = Callable[..., Ran]
Launch = Callable[..., RunningCluster]


def tf_config(context: HostContext) -> Any:
    text = os.environ.get("TF_CONFIG")
    return None if text is None else json.loads(text)


def test_several_hosts_get_the_tf_config_of_a_real_cluster(run: Run) -> None:
    first, second = run("2x2", tf_config).values
    assert first["cluster"] == second["cluster"]
    assert list(first["cluster"]) == ["worker"]
    assert len(set(first["cluster"]["worker"])) == 2
    assert [one["task"] for one in (first, second)] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]


def test_with_parameter_servers_a_chief_comes_first_and_servers_last(run: Run) -> None:
    def entry(context: HostContext) -> Any:
        return context.role, context.host, json.loads(os.environ["TF_CONFIG"])

    values = {outcome.host: outcome.value for outcome in run("1x1+2ps", entry).outcomes.values() if outcome.pickled}
    role, host, config = values[0]
    assert (role, host) == ("chief", 0)
    assert {name: len(addresses) for name, addresses in config["cluster"].items()} == {"chief": 1, "worker": 1, "ps": 2}
    assert config["task"] == {"type": "chief", "index": 0}


def test_what_serves_is_ended_when_the_chief_is_done(run: Run) -> None:
    def entry(context: HostContext) -> str:
        if context.role != "chief":
            signal.pause()
        return "done"

    outcomes = run("1x1+1ps", entry).outcomes
    assert [outcomes[host].status for host in (0, 1, 2)] == ["returned", "ended", "ended"]


def test_one_host_has_no_tf_config_and_not_the_one_of_the_shell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert run("1x4", tf_config).values == [None]


def test_a_reference_of_several_hosts_is_one_worker(run: Run) -> None:
    [config] = run("1x1", tf_config, tf_config=True).values
    assert len(config["cluster"]["worker"]) == 1
    assert config["task"] == {"type": "worker", "index": 0}


def test_values_come_back(run: Run) -> None:
    assert run("3x1", lambda context: {"host": context.host, "role": context.role}).values == [
        {"host": host, "role": "worker"} for host in range(3)
    ]


def test_an_exception_comes_back_with_the_programs_own_traceback(run: Run) -> None:
    def entry(context: HostContext) -> None:
        def inner() -> None:
            raise ValueError("no such thing")

        inner()

    outcome = run("1x1", entry).outcomes[0]
    assert (outcome.status, outcome.code) == ("raised", 1)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.message) == ("ValueError", "no such thing")
    assert outcome.error.traceback_text.endswith("ValueError: no such thing")
    assert "in inner" in outcome.error.traceback_text
    assert "emulate/cluster/" not in outcome.error.traceback_text.replace("tests/emulate/cluster/", "")
    error = outcome.error.exception()
    assert isinstance(error, ValueError)
    assert error.__traceback__ is not None


def test_an_exception_that_cannot_be_sent_comes_back_as_text(run: Run) -> None:
    def entry(context: HostContext) -> None:
        raise RuntimeError(threading.Lock())

    error = run("1x1", entry).outcomes[0].error
    assert error is not None
    assert error.exception() is None
    assert "RuntimeError: <unlocked" in error.traceback_text


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so(run: Run) -> None:
    error = run("1x1", lambda context: threading.Lock()).outcomes[0].error
    assert error is not None
    assert error.message.startswith("What a function returns on a host must be sendable to another process. Received: a lock")


@pytest.mark.parametrize(
    ("leave", "status", "code"),
    [
        (lambda context: sys.exit(), "returned", 0),
        (lambda context: sys.exit(0), "returned", 0),
        (lambda context: sys.exit(3), "exited", 3),
        (lambda context: sys.exit("no"), "exited", 1),
        (lambda context: os._exit(4), "exited", 4),
        (lambda context: os.kill(os.getpid(), signal.SIGKILL), "killed", -9),
        (lambda context: os.abort(), "killed", -6),
    ],
)
def test_every_way_of_leaving_is_told_apart(run: Run, leave: Callable[[Any], Any], status: str, code: int) -> None:
    ran = run("1x1", leave)
    assert (ran.outcomes[0].status, ran.outcomes[0].code) == (status, code)
    assert ran.sent("exit") == [{"event": "exit", "status": status, "code": code}]


def test_a_host_that_is_done_stays_until_all_are(run: Run) -> None:
    def entry(context: HostContext) -> bool:
        mine, other = (context.directory.parent / f"pid-{number}" for number in (context.host, 1 - context.host))
        mine.write_text(str(os.getpid()))
        if context.host == 0:
            return True
        while not other.exists() or not other.read_text():
            pass
        context.send({"event": "looking"})
        for _ in range(50):
            os.kill(int(other.read_text()), 0)
            threading.Event().wait(0.01)
        return True

    assert run("2x1", entry).values == [True, True]


def test_output_of_python_of_c_and_of_children_is_captured_by_host(run: Run) -> None:
    def entry(context: HostContext) -> None:
        print("python", context.host)
        os.write(2, b"c")
        subprocess.run(["echo", "child"], check=True)

    ran = run("2x1", entry)
    assert [ran.output(host).split() for host in (0, 1)] == [["python", str(host), "child"] for host in (0, 1)]
    assert ran.output(1, "stderr") == "c"


def test_what_a_killed_host_printed_is_there(run: Run) -> None:
    def entry(context: HostContext) -> None:
        print("the last words")
        os.kill(os.getpid(), signal.SIGKILL)

    assert run("1x1", entry).output(0) == "the last words\n"


def test_echoed_output_of_several_hosts_carries_their_names(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def entry(context: HostContext) -> None:
        print("out")
        print("err", file=sys.stderr)
        print("no end", end="")

    run("2x1", entry, echo=True)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[host 0] no end", "[host 0] out", "[host 1] no end", "[host 1] out"]
    assert sorted(err.splitlines()) == ["[host 0] err", "[host 1] err"]


def test_echoed_output_of_one_host_is_ours(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run("1x2", lambda context: print("out"), echo=True)
    assert capfd.readouterr().out == "out\n"


def test_echo_does_not_end_before_the_last_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("2x1", lambda context: print("x" * 1000 + "\n" + "y\n" * 5000), echo=True)
    assert capsys.readouterr().out.count("] y\n") == 10000


def test_events_arrive_in_order_from_every_thread(run: Run) -> None:
    def entry(context: HostContext) -> None:
        def count(name: str) -> None:
            for number in range(200):
                context.send({"event": "count", "name": name, "number": number})

        threads = [threading.Thread(target=count, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    counted = run("2x1", entry).sent("count")
    assert [one["number"] for one in counted if one["name"] == "a"].count(199) == 2
    assert len(counted) == 800


def test_more_than_a_buffer_of_events_and_a_large_result_arrive(run: Run) -> None:
    def entry(context: HostContext) -> bytes:
        for _ in range(100):
            context.send({"event": "long", "text": "x" * 100_000})
        return bytes(20_000_000)

    ran = run("1x1", entry)
    assert len(ran.values[0]) == 20_000_000
    assert len(ran.sent("long")) == 100


def test_the_environment_the_arguments_and_the_working_directory_are_the_callers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def entry(context: HostContext) -> Any:
        return os.getcwd(), os.environ["SPECIAL"], sys.argv, sys.stdin.read()

    assert run("1x1", entry, environment={"SPECIAL": "yes"}).values == [(str(tmp_path), "yes", [""], "")]


def test_stacks_say_where_each_live_host_is(launch: Launch) -> None:
    def entry(context: HostContext) -> None:
        def waiting_for_godot() -> None:
            context.send({"event": "waiting"})
            threading.Event().wait()

        if context.host == 1:
            waiting_for_godot()

    with launch("2x1", entry) as cluster:
        events_until(cluster, lambda events: any(event["event"] == "waiting" for _, event in events))
        [stack] = wait_until(lambda: [text for host, text in cluster.stacks().items() if host == 1 and "wait\n" in text])
    assert "in waiting_for_godot" in stack
    assert stack.index("in entry") < stack.index("in waiting_for_godot")
    assert "emulate/cluster/host.py" not in stack


def test_stacks_come_while_the_interpreters_lock_is_held(launch: Launch) -> None:
    def entry(context: HostContext) -> None:
        def never_lets_go() -> None:
            context.send({"event": "busy"})
            sum(range(1 << 60))  # one call in C

        never_lets_go()

    with launch("1x1", entry) as cluster:
        events_until(cluster, lambda events: any(event["event"] == "busy" for _, event in events))
        assert "in never_lets_go" in wait_until(lambda: cluster.stacks().get(0))


def test_hosts_draw_different_numbers_from_every_generator(run: Run, preload: Preload) -> None:
    def entry(context: HostContext) -> Any:
        import random

        import numpy as np
        import tensorflow as tf

        return random.random(), float(np.random.rand()), float(tf.random.uniform([]))

    values = run("2x1", entry, preload).values + run("2x1", entry, preload).values
    assert all(len(set(drawn)) == 4 for drawn in zip(*values, strict=True))


def test_temporary_files_of_the_program_are_gone_afterwards(run: Run) -> None:
    def entry(context: HostContext) -> str:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return file.name

    [name] = run("1x1", entry).values
    assert not os.path.exists(name)
    assert not os.path.exists(os.path.dirname(name))


def test_clusters_run_at_the_same_time_from_one_parent(launch: Launch, tmp_path: Path) -> None:
    clusters = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        clusters.append(launch("2x1", lambda context: os.getpid(), directory=tmp_path / str(number)))
    pids = set()
    for cluster in clusters:
        with cluster:
            events_until(cluster, lambda _, cluster=cluster: cluster.is_over)
            pids |= {outcome.value for outcome in cluster.outcomes}
    assert len(pids) == 6


def test_hosts_with_hashes_of_their_own_hash_otherwise_and_are_hosts_in_all_else(run: Run) -> None:
    """Each but the first is an interpreter of its own in the same network, folders and environment."""

    def entry(context: HostContext) -> Any:
        print("said", context.host)
        context.send({"event": "told"})
        Path(tempfile.gettempdir(), f"left-{context.host}").touch()
        here = os.getcwd(), tf_config(context)["cluster"], tempfile.gettempdir(), os.readlink("/proc/self/ns/net")
        return hash("word"), here, sorted(os.listdir("/proc/self/fd"))

    ran = run("3x1", entry, own_hashes=True)
    first, second, third = ran.values
    assert len({hash("word"), *(value[0] for value in ran.values)}) >= 3
    assert first[1] == second[1] == third[1]
    assert len(first[2]) == len(second[2]) == len(third[2])
    assert [ran.output(host) for host in range(3)] == ["said 0\n", "said 1\n", "said 2\n"]
    assert len(ran.sent("told")) == 3


@pytest.mark.parametrize("how", ["raised", "killed", "ended"])
def test_the_end_of_a_host_with_hashes_of_its_own_is_told_as_any(run: Run, how: str) -> None:
    def entry(context: HostContext) -> None:
        if context.host and how == "raised":
            raise ValueError("wrong")
        if context.host and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if context.host and how == "ended":
            sys.exit(3)

    outcome = run("2x1", entry, own_hashes=True).outcomes[1]
    told = {"raised": ("raised", 1), "killed": ("killed", -9), "ended": ("exited", 3)}
    assert (outcome.status, outcome.code) in (told[how], (told[how][0], None))
