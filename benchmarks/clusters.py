"""Clusters: how long until the first all-reduce on 4x1, and how much memory, beside the alternatives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from benchmarks.all_reduce import HOSTS, all_reduce, end, fresh_processes, wait_for_all
from benchmarks.figure import Figure, in_turn, seconds
from emulate.cluster import Cluster

TIMES = 5


def figures() -> Iterator[Figure]:
    """All figures about clusters."""
    with Cluster(f"{HOSTS}x1") as cluster:
        cluster.run(all_reduce)  # the parent is up

        def warm() -> float:
            return seconds(lambda: cluster.run(all_reduce))

        ours, theirs = in_turn(warm, _fresh, TIMES)
        yield Figure("cluster_4x1_vs_fresh", theirs / ours, 8.0, True, ours, theirs, "one fresh process per host")
        ours, theirs = in_turn(warm, _multi_process_runner, 3)
        yield Figure(
            "cluster_4x1_vs_multi_process_runner", theirs / ours, 10.0, True, ours, theirs, "TensorFlow's multi_process_runner"
        )
    ours, theirs = in_turn(_cold, _one_fresh, TIMES)
    yield Figure(
        "cluster_4x1_cold_minus_fresh", ours - theirs, 0.6, False, ours, theirs, "one fresh process with one worker", unit="s"
    )
    ours, theirs = _our_memory(), _their_memory()
    yield Figure("cluster_4x1_memory", ours / theirs, 0.5, False, ours, theirs, "four fresh processes", of="MB")


def _fresh() -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        processes = fresh_processes(folder)
        try:
            wait_for_all(processes)
            return time.perf_counter() - started
        finally:
            end(processes)


def _cold() -> float:
    def run() -> None:
        with Cluster(f"{HOSTS}x1") as cluster:
            cluster.run(all_reduce)

    return seconds(run)


def _one_fresh() -> float:
    """One process that imports TensorFlow and sums over one worker: what any program pays."""
    code = (
        "import tensorflow as tf\n"
        "s = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "print(float(tf.function(lambda: s.reduce('SUM', s.run(lambda: tf.ones([])), axis=None))()))"
    )
    return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True))


def _multi_process_runner() -> float:
    """TensorFlow's own harness, in a process of its own because it wants to be a main program."""
    if importlib.util.find_spec("dill") is None:
        raise SystemExit("The comparison with multi_process_runner needs dill. Received: none installed. Run `make bench`.")
    with tempfile.TemporaryDirectory() as folder:  # its workers are killed, and leave their temporary files
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.their_runner"],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in result.stdout.splitlines() if line.startswith("seconds ")]
    if not lines:
        raise SystemExit(f"multi_process_runner did not run:\n{result.stderr[-2000:]}")
    return float(lines[-1].split()[1])


def _memory(pids: list[int]) -> float:
    """Proportional set size in MB: a page shared by n processes counts 1/n in each."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 1e6


def _our_memory() -> float:
    """Of the pre-loaded parent, the keeper and the hosts, while the hosts hold their all-reduced strategies."""
    import threading

    with Cluster(f"{HOSTS}x1") as cluster:
        cluster.run(all_reduce)
        holding = threading.Thread(target=lambda: cluster.run(_hold), daemon=True)
        holding.start()
        time.sleep(4.0)
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        used = _memory(pids)
        holding.join()
    return used


def _hold() -> None:
    all_reduce()
    time.sleep(8.0)


def _their_memory() -> float:
    with tempfile.TemporaryDirectory() as folder:
        processes = fresh_processes(folder)
        try:
            wait_for_all(processes)
            return _memory([process.pid for process in processes])
        finally:
            end(processes)
