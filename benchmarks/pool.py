"""The pool: a warm run beside TensorFlow's own pool and beside fresh processes, and how soon a killed process is noticed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.all_reduce import HOSTS, total
from benchmarks.clusters import _fresh, _multi_process_runner
from benchmarks.figure import Figure, in_turn, seconds
from emulate import Pool
from emulate.cluster import HostContext

ROUNDS = 5
IN_A_ROW = 5
KILLS = 50


def figures() -> Iterator[Figure]:
    """All figures about the pool."""
    with Pool() as pool:
        for hosts in (2, HOSTS):
            yield from _warm(pool, hosts)
        yield from _first(pool)
        yield _killed_host(pool)
    yield _killed_supervisor()


def total_on_host(context: HostContext) -> float:
    return total()


def timed_total(context: HostContext) -> tuple[float, float]:
    """The total, and how long this host took for it."""
    started = time.perf_counter()
    return total(), time.perf_counter() - started


def _run(pool: Pool, hosts: int, *, fresh: bool = False) -> None:
    with pool.lease(f"{hosts}x1", fresh=fresh) as lease:
        assert [result.value for result in lease.run(total_on_host)] == [hosts] * hosts


def _run_timed(pool: Pool, hosts: int) -> float:
    """Seconds of the body alone: those of the host that began last and waited for nobody."""
    with pool.lease(f"{hosts}x1") as lease:
        values = [result.value for result in lease.run(timed_total)]
    assert [value for value, _ in values] == [hosts] * hosts
    return min(taken for _, taken in values)


def _warm(pool: Pool, hosts: int) -> Iterator[Figure]:
    """Several runs in a row, so that what a host does between two of them counts too; and the body, which both sides run."""
    bodies: list[float] = []

    def ours() -> float:
        return seconds(lambda: bodies.extend(_run_timed(pool, hosts) for _ in range(IN_A_ROW))) / IN_A_ROW

    with _their_pool(hosts) as theirs:
        _run(pool, hosts)
        here, there = in_turn(ours, theirs, ROUNDS)
    against = "TensorFlow's MultiProcessPoolRunner"
    yield Figure(f"pool_warm_{hosts}x1", there / here, 2.0, True, here, there, against)
    body = statistics.median(bodies)
    yield Figure(f"pool_warm_{hosts}x1_body", there / body, None, True, body, there, against)


@contextlib.contextmanager
def _their_pool(hosts: int) -> Iterator[Any]:
    if importlib.util.find_spec("dill") is None:
        raise SystemExit("The comparison with MultiProcessPoolRunner needs dill. Received: none installed. Run `make bench`.")
    command = [sys.executable, "-m", "benchmarks.their_pool", str(hosts)]
    with (
        tempfile.TemporaryDirectory() as folder,  # its workers are killed, and leave their temporary files
        subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(("up", "seconds")))  # its workers write there too
        try:
            assert next(lines, "") == "up\n", "MultiProcessPoolRunner did not run"

            def run() -> float:
                print(IN_A_ROW, file=process.stdin, flush=True)
                return statistics.mean(float(next(lines).split()[1]) for _ in range(IN_A_ROW))

            yield run
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _first(pool: Pool) -> Iterator[Figure]:
    """A cluster that has run nothing, as after a failure."""

    def ours() -> float:
        return seconds(lambda: _run(pool, HOSTS, fresh=True))

    here, there = in_turn(ours, _multi_process_runner, 3)
    yield Figure("pool_first_4x1_vs_multi_process_runner", there / here, 10.0, True, here, there, "multi_process_runner")
    here, there = in_turn(ours, _fresh, 3)
    yield Figure("pool_first_4x1_vs_fresh", there / here, None, True, here, there, "one fresh process per host")


def train(context: HostContext) -> None:
    """Sum over the hosts step after step, until somebody ends it."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def add() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None)

    step = 0
    while True:
        add()
        step += 1
        context.send({"event": "progress", "step": step})
        if step == 1:
            context.send({"event": "pid", "pid": os.getpid()})


def _killed_host(pool: Pool) -> Figure:
    """From the kill of one host at a random moment until the lease has told so, with the step, and has ended the other."""
    chance = random.Random(0)
    took = [_kill_one(pool, chance) for _ in range(KILLS)]
    median = statistics.median(took)
    return Figure(
        "pool_killed_host_reported", max(took), 2.0, False, max(took), median, f"the median of {KILLS} kills", unit="s"
    )


def _kill_one(pool: Pool, chance: random.Random) -> float:
    chosen, delay = chance.randrange(2), chance.random()
    killed: list[float] = []

    def kill(pid: int) -> None:
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    def take(host: int, event: dict[str, Any]) -> None:
        if event["event"] == "pid" and host == chosen:
            threading.Timer(delay, kill, (event["pid"],)).start()

    with pool.lease("2x1") as lease:
        results = lease.run(train, on_event=take, timeout=60)
        took = time.perf_counter() - killed[0]
    assert results[chosen].status == "killed", results
    assert results[chosen].step is not None, results
    _run(pool, 2)  # the pool is healthy
    return took


_SUPERVISOR = """
import json, time
from benchmarks.pool import total_on_host
from emulate import Pool
with Pool() as pool:
    for topology in ("2x1", "1x2"):
        with pool.lease(topology) as lease:
            lease.run(total_on_host)
    with pool.lease("4x1") as lease:
        lease.run(total_on_host)
        print(json.dumps(str(pool._preload.directory)), flush=True)
        lease.run(lambda context: time.sleep(600))
"""


def _killed_supervisor() -> Figure:
    """From the kill of a process with three warm clusters until none of their processes, and no folder, is there."""
    took = [_kill_supervisor() for _ in range(ROUNDS)]
    median = statistics.median(took)
    return Figure("pool_killed_supervisor", max(took), 2.0, False, max(took), median, f"the median of {ROUNDS}", unit="s")


def _kill_supervisor() -> float:
    process = psutil.Popen([sys.executable, "-c", _SUPERVISOR], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    scratch = json.loads(process.stdout.readline())
    time.sleep(0.2)
    descendants = process.children(recursive=True)
    assert len(descendants) >= 11, descendants  # a parent, three keepers, seven hosts
    started = time.perf_counter()
    process.kill()
    process.communicate()
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in descendants) or os.path.exists(scratch):
        time.sleep(0.01)
    return time.perf_counter() - started
