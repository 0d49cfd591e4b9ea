"""However a cluster ends, no process, port, descriptor or file outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from emulate.cluster import ClusterPlan, HostContext, Preload, RunningCluster
from emulate.errors import Unavailable
from emulate.topology import Topology
from tests.emulate.cluster.helpers import events_until, is_running, start_python, wait_until

ROOT = str(Path(__file__).parents[3])
Launch = Callable[..., RunningCluster]


def daemonise_and_wait(context: HostContext) -> None:
    """What is hardest to find again: a process of a process, in a session of its own, deaf to all but SIGKILL."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            context.send({"event": "pid", "pid": os.getpid()})
            while True:
                signal.pause()
        os._exit(0)
    child = subprocess.Popen(["sleep", "1000"])
    context.send({"event": "pid", "pid": child.pid})
    context.send({"event": "pid", "pid": os.getpid()})
    signal.pause()


def pids_of(cluster: RunningCluster, count: int) -> list[int]:
    events = events_until(cluster, lambda seen: sum(event["event"] == "pid" for _, event in seen) == count)
    return [event["pid"] for _, event in events if event["event"] == "pid"]


@pytest.mark.parametrize("topology", ["1x1", "2x1"])
def test_end_kills_every_descendant(launch: Launch, topology: str) -> None:
    count = 3 * Topology.parse(topology).num_hosts
    with launch(topology, daemonise_and_wait) as cluster:
        pids = pids_of(cluster, count)
        assert all(is_running(pid) for pid in pids)
        cluster.end()
        assert not any(is_running(pid) for pid in pids)
        assert [outcome.status for outcome in cluster.outcomes] == ["ended"] * (count // 3)
        assert cluster.events(0) == []


def test_an_exception_in_the_supervisor_ends_the_cluster(launch: Launch) -> None:
    pids: list[int] = []

    def supervise() -> None:
        with launch("2x1", daemonise_and_wait) as cluster:
            pids.extend(pids_of(cluster, 6))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervise()
    assert not any(is_running(pid) for pid in pids)


def test_a_host_that_is_over_takes_its_daemons_with_it_when_the_cluster_ends(launch: Launch) -> None:
    def entry(context: HostContext) -> None:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        context.send({"event": "pid", "pid": child.pid})

    with launch("1x1", entry) as cluster:
        [pid] = pids_of(cluster, 1)
        events_until(cluster, lambda _: cluster.is_over)
    assert not is_running(pid)


def test_a_host_that_does_not_leave_is_killed_at_its_deadline(launch: Launch) -> None:
    def entry(context: HostContext) -> int:
        real = os._exit
        os._exit = lambda code: signal.pause()  # type: ignore[assignment]
        assert real
        return os.getpid()

    with launch("2x1", entry, shutdown_timeout=0.2) as cluster:
        events_until(cluster, lambda _: cluster.is_over)
    assert not any(is_running(outcome.value) for outcome in cluster.outcomes)


def test_a_killed_keeper_leaves_nothing(launch: Launch) -> None:
    def entry(context: HostContext) -> None:
        context.send({"event": "keeper", "pid": os.getppid()})
        daemonise_and_wait(context)

    with launch("2x1", entry) as cluster:
        events = events_until(cluster, lambda seen: len(seen) == 2 * (1 + 1 + 3))
        keeper = next(event["pid"] for _, event in events if event["event"] == "keeper")
        os.kill(keeper, signal.SIGKILL)
        events_until(cluster, lambda _: cluster.is_over)
        assert [outcome.status for outcome in cluster.outcomes] == ["killed", "killed"]
    for _, event in events:
        if event["event"] == "pid":
            wait_until(lambda pid=event["pid"]: not is_running(pid))


def test_descriptors_are_closed(launch: Launch, tmp_path: Path) -> None:
    def once(number: int, **options: Any) -> int:
        (tmp_path / f"{number}").mkdir()
        with launch("2x1", lambda context: None, directory=tmp_path / f"{number}", **options) as cluster:
            events_until(cluster, lambda _: cluster.is_over)
        return psutil.Process().num_fds()

    assert once(0) == once(1) == once(2, echo=True) == once(3, echo=True)


def test_a_parent_that_is_closed_leaves_no_process_and_no_folder() -> None:
    with Preload(imports=False) as preload:
        folder, [process] = preload.directory, [one for one in psutil.Process().children() if is_preload(one, preload)]
        assert folder.is_dir()
    assert not process.is_running()
    assert not folder.exists()


def is_preload(process: psutil.Process, preload: Preload) -> bool:
    return str(preload.directory / "preload.log") in [file.path for file in process.open_files()]


def test_a_parent_that_dies_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('this TensorFlow is broken')")
    path = list(sys.path)
    sys.path.insert(0, str(tmp_path))
    try:
        preload = Preload()
    finally:
        sys.path[:] = path
    plan = ClusterPlan(Topology.parse("1x1"), lambda context: None, tmp_path)
    with pytest.raises(Unavailable) as caught, preload, preload.launch(plan) as cluster:
        events_until(cluster, lambda _: cluster.is_over)
    assert "The process from which hosts are forked must be able to start. Received:" in str(caught.value)
    assert "this TensorFlow is broken" in str(caught.value)
    assert "Check that `python -c 'import tensorflow; tensorflow.keras.layers'` works." in str(caught.value)


def test_hosts_that_do_not_start_in_time_are_an_error(launch: Launch) -> None:
    before = set(psutil.Process().children())
    with Preload(imports=False) as preload:
        (parent,) = set(psutil.Process().children()) - before
        with launch("1x1", lambda context: None, preload=preload) as cluster:
            cluster.end()  # the parent is there and forks
        parent.suspend()  # as on a machine that is too busy
        try:
            late = launch("3x1", lambda context: None, preload=preload, start_timeout=0.1)
            with late, pytest.raises(Unavailable) as caught:
                events_until(late, lambda _: late.is_over)
        finally:
            parent.resume()
    assert str(caught.value).startswith("Every host must start within 0.1 s. Received: host 0, host 1, host 2 had not. ")


def test_a_module_beside_the_callers_script_does_not_shadow_what_tensorflow_imports(tmp_path: Path) -> None:
    (tmp_path / "timeit.py").write_text("raise ImportError('not the real one')")
    script = tmp_path / "script.py"
    script.write_text("from emulate.cluster import Cluster\nwith Cluster('1x1') as cluster: print(cluster.run(abs, -1))")
    out = subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, check=True)
    assert out.stdout == b"[1]\n"


SUPERVISOR = """
import sys, time, json, os, tempfile
from pathlib import Path
from emulate.cluster import *
from emulate.topology import Topology
from tests.emulate.cluster.test_cluster_ends import daemonise_and_wait
import tests.emulate.cluster.test_cluster_ends as module
import cloudpickle; cloudpickle.register_pickle_by_value(module)
with Preload(imports=sys.argv[1] == "loaded") as preload:
    directory = Path(tempfile.mkdtemp(dir=preload.directory))
    plan = ClusterPlan(Topology.parse(sys.argv[2]), daemonise_and_wait, directory, views=(Path.cwd(),), cwd=Path.cwd())
    with preload.launch(plan) as cluster:
        found = []
        print(json.dumps(["folder", str(preload.directory)]), flush=True)
        while True:
            for host, event in cluster.events(1):
                if event["event"] == "pid":
                    print(json.dumps(["pid", event["pid"]]), flush=True)
"""


def supervise(*args: str, folder: Path, pids: int) -> tuple[psutil.Popen, Path, list[psutil.Process]]:
    process = start_python(SUPERVISOR, *args, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    scratch = Path(json.loads(process.stdout.readline())[1])
    for _ in range(pids):
        assert json.loads(process.stdout.readline())[0] == "pid"
    return process, scratch, process.children(recursive=True)


def finish(process: psutil.Popen) -> tuple[int, str]:
    _, err = process.communicate()
    return process.returncode, err.decode()


@pytest.mark.parametrize("topology", ["1x2", "2x1"])
def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path: Path, topology: str) -> None:
    process, scratch, descendants = supervise("bare", topology, folder=tmp_path, pids=3 * Topology.parse(topology).num_hosts)
    assert len(descendants) >= 4
    process.kill()
    finish(process)
    wait_until(lambda: not any(is_running(one.pid) for one in descendants))
    wait_until(lambda: not scratch.exists())


def test_what_is_left_when_all_are_killed_at_once_goes_with_the_next_start(tmp_path: Path) -> None:
    process, scratch, descendants = supervise("bare", "2x1", folder=tmp_path, pids=6)
    process.suspend()
    for one in descendants:
        one.kill()
    process.kill()
    finish(process)
    wait_until(lambda: not any(is_running(one.pid) for one in descendants))
    assert scratch.exists()
    with Preload(imports=False) as first:
        assert not scratch.exists()
        with Preload(imports=False) as second:
            assert first.directory.exists()
        assert not second.directory.exists()
    assert not first.directory.exists()


def test_sigkill_while_tensorflow_is_being_imported_leaves_nothing(tmp_path: Path) -> None:
    process, scratch, _ = supervise("loaded", "2x1", folder=tmp_path, pids=0)
    descendants = wait_until(lambda: process.children(recursive=True))
    process.kill()
    finish(process)
    wait_until(lambda: not any(is_running(one.pid) for one in descendants))
    wait_until(lambda: not scratch.exists())


def test_ctrl_c_is_a_keyboard_interrupt_and_leaves_nothing(tmp_path: Path) -> None:
    process, scratch, descendants = supervise("bare", "2x1", folder=tmp_path, pids=6)
    process.send_signal(signal.SIGINT)
    code, err = finish(process)
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not any(is_running(one.pid) for one in descendants)
    assert not scratch.exists()


def test_a_supervisor_that_forgets_to_close_leaves_nothing() -> None:
    code = "import sys; from emulate.cluster import Preload; p = Preload(imports=False); print(p.directory)"
    process = start_python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert not os.path.exists(out.decode().strip())


def test_an_orphan_that_holds_the_supervisors_sockets_does_not_keep_a_cluster_alive(tmp_path: Path) -> None:
    """A process the supervisor forked has copies of its descriptors; that the supervisor has gone is noticed all the same."""
    code = SUPERVISOR.replace(
        "        found = []\n", "        if os.fork() == 0:\n            time.sleep(30)\n            os._exit(0)\n"
    )
    process = start_python(code, "bare", "2x1", cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    scratch = Path(json.loads(process.stdout.readline())[1])
    for _ in range(6):
        process.stdout.readline()
    descendants = [
        one
        for one in process.children(recursive=True)
        if one.ppid() != process.pid or "preload import main" in " ".join(one.cmdline())
    ]
    holders = [one for one in process.children() if one not in descendants]
    process.kill()
    process.stdout.close()
    process.wait()
    try:
        wait_until(lambda: not any(is_running(one.pid) for one in descendants if one not in holders))
        wait_until(lambda: not scratch.exists())
    finally:
        for holder in holders:
            holder.kill()


FORKED = """
import os, sys
from emulate import Cluster, Pool
from emulate.errors import UsageError

if sys.argv[1] == "cluster":
    owned = Cluster("2x1")
    def use():
        return owned.run(lambda: "used")
else:
    owned = Pool()
    lease = owned.lease("2x1")
    def use():
        if sys.argv[1] == "lease":
            return [result.value for result in lease.run(lambda context: "used")]
        with owned.lease("2x1") as other:
            return [result.value for result in other.run(lambda context: "used")]
with owned:
    print(use(), flush=True)
    if os.fork() == 0:
        try:
            use()
        except UsageError as error:
            print(error, flush=True)
        sys.exit(0)  # it leaves the `with`, and what is called at the exit of a process is called
    _, status = os.wait()
    print(status, use(), flush=True)
"""


@pytest.mark.parametrize("owned", ["cluster", "lease", "pool"])
def test_a_forked_process_cannot_use_what_its_parent_made_and_leaves_it_as_it_is(owned: str) -> None:
    process = start_python(FORKED, owned, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    before, refused, after = output.decode().splitlines()
    assert (before, after) == ("['used', 'used']", "0 ['used', 'used']")
    assert f"A {owned} serves the process that made it. Received: process=" in refused
    assert f"forked from {process.pid}. Make another one in this process" in refused


IN_A_DELETED_FOLDER = """
import os, sys, tempfile
import emulate
from emulate.errors import UsageError

def told(make):
    try:
        make()
    except UsageError as error:
        print(error)

with emulate.Cluster("1x1") as cluster, emulate.Pool() as pool, pool.lease("1x1") as lease:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    told(lambda: cluster.run(len, ()))
    told(lambda: lease.run(len))
    told(lambda: emulate.Cluster("1x1"))
    told(lambda: emulate.verify("train.py"))
"""


def test_a_working_directory_that_was_deleted_is_said_to_be() -> None:
    process = start_python(IN_A_DELETED_FOLDER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    said = "The working directory must be there. Received: one that was deleted or cannot be seen (No such file or directory)."
    assert output.decode() == f"{said} Change to a folder that exists.\n" * 4
