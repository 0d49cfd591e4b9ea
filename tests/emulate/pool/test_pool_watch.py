"""What becomes of warm clusters when a host, a keeper or the supervisor itself is killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from emulate.cluster import HostContext, Pool, Preload
from tests.emulate.cluster.helpers import is_running, start_python, wait_until

LIMIT = 60.0


@pytest.fixture(scope="module")
def bare() -> Iterator[Preload]:
    """A parent that has not imported TensorFlow: its hosts are there in milliseconds."""
    with Preload(imports=False) as preload:
        yield preload


def count_steps(context: HostContext) -> None:
    context.send({"event": "pid", "pid": os.getpid()})
    for step in range(100_000):
        context.send({"event": "progress", "step": step})
        time.sleep(0.005)


@pytest.mark.parametrize("moment", range(4))
def test_a_killed_host_is_reported_with_its_step_and_the_others_are_ended(bare: Preload, moment: int) -> None:
    chosen = random.Random(moment).randrange(3)
    events: list[tuple[int, dict[str, Any]]] = []

    def take(host: int, event: dict[str, Any]) -> None:
        events.append((host, event))
        if event["event"] == "pid" and host == chosen:
            delay = random.Random(moment).random() * 0.3
            threading.Timer(delay, os.kill, (event["pid"], signal.SIGKILL)).start()

    with Pool(preload=bare) as pool:
        with pool.lease("3x1") as lease:
            results = lease.run(count_steps, grace=0.1, on_event=take)
            assert lease.names[chosen] == f"host {chosen}"
        assert [result.status for result in results] == ["killed" if host == chosen else "ended" for host in range(3)]
        assert results[chosen].code == -signal.SIGKILL
        assert all(result.step is not None for host, result in enumerate(results) if host != chosen)
        steps = [event["step"] for host, event in events if host == chosen and event["event"] == "progress"]
        assert results[chosen].step == (steps[-1] if steps else None)
        assert (chosen, {"event": "exit", "status": "killed", "code": -signal.SIGKILL}) in events
        with pool.lease("3x1") as lease:
            assert [result.value for result in lease.run(lambda context: context.host)] == [0, 1, 2]


def test_a_host_that_is_killed_while_idle_is_replaced(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        [first, _] = lease.run(lambda context: os.getpid())
    os.kill(first.value, signal.SIGKILL)
    wait_until(lambda: not is_running(first.value))
    with pool.lease("2x1") as lease:
        assert [result.status for result in lease.run(lambda context: None)] == ["returned"] * 2
    assert "host 0 ended (killed, -9)" in pool.statistics.reasons[0]


def test_a_killed_keeper_is_the_end_of_its_hosts_and_the_next_cluster_is_healthy(bare: Preload) -> None:
    def kill_keeper(context: HostContext) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LIMIT)

    with Pool(preload=bare) as pool, pool.lease("2x1") as lease:
        assert {result.status for result in lease.run(kill_keeper, grace=0.1)} == {"killed"}
        assert [result.status for result in lease.run(lambda context: None)] == ["returned"] * 2


def test_an_exception_out_of_on_event_ends_the_job_and_the_next_lease_is_healthy(bare: Preload) -> None:
    def fail(host: int, event: dict[str, Any]) -> None:
        raise LookupError("as asked")

    with Pool(preload=bare) as pool:
        with pytest.raises(LookupError, match="as asked"), pool.lease("2x1") as lease:
            lease.run(count_steps, on_event=fail)
        assert "its job was interrupted" in pool.statistics.reasons[0]
        with pool.lease("2x1") as lease:
            assert [result.status for result in lease.run(lambda context: None)] == ["returned"] * 2


def test_a_pool_that_is_closed_leaves_no_process_thread_or_folder(bare: Preload) -> None:
    with Pool(preload=bare) as pool:
        pool.prepare("2x1", "1x1")
        with pool.lease("2x1") as lease:
            pids = [result.value for result in lease.run(lambda context: os.getpid())]
    assert not any(is_running(pid) for pid in pids)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("end of")]
    assert sorted(path.name for path in bare.directory.iterdir()) == ["held", "preload.log"]


SUPERVISOR = """
import json, os, signal, sys, time
from emulate.cluster import Preload
from emulate.cluster import Pool

def job(context):
    context.send({"event": "there"})
    time.sleep(60)

def take(host, event):
    seen.append(host)
    if len(seen) == 2:
        print(json.dumps(str(pool._preload.directory)), flush=True)

seen = []
with Preload(imports=False) as preload, Pool(preload=preload) as pool:
    pool.prepare("1x1", "2x1")
    with pool.lease("2x1") as lease:
        lease.run(lambda context: None)
        lease.run(job, on_event=take)
"""


def supervise(folder: Path) -> tuple[psutil.Popen, Path, list[psutil.Process]]:
    process = start_python(SUPERVISOR, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    scratch = Path(json.loads(process.stdout.readline()))
    return process, scratch, process.children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_supervisor_that_ends_by_a_signal_leaves_no_warm_cluster(tmp_path: Path, number: signal.Signals) -> None:
    process, scratch, descendants = supervise(tmp_path)
    assert len(descendants) >= 6  # a parent, two keepers, three hosts
    process.send_signal(number)
    process.communicate()
    wait_until(lambda: not any(is_running(one.pid) for one in descendants))
    wait_until(lambda: not scratch.exists())
