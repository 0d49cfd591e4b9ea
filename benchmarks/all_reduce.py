"""What the cluster benchmarks time: from nothing to the first completed all-reduce on four hosts.

As a script it is one host of a cluster of fresh processes, told by TF_CONFIG where it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

HOSTS = 4


def total() -> float:
    """Make the strategy, sum a one from each host, return the sum."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def add() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None)

    result = float(add())
    assert result == strategy.num_replicas_in_sync, result
    return result


def all_reduce() -> float:
    """`total` of the hosts that the cluster benchmarks have."""
    result = total()
    assert result == HOSTS, result
    return result


def fresh_processes(folder: str) -> list[subprocess.Popen[bytes]]:
    """Start one fresh Python for each host, with a folder for temporary files: killed, they leave theirs."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(HOSTS)]
    workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return [_fresh(workers, index, folder) for index in range(HOSTS)]


def _fresh(workers: list[str], index: int, folder: str) -> subprocess.Popen[bytes]:
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": folder}
    command = [sys.executable, "-m", "benchmarks.all_reduce"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until each has said that its all-reduce is done."""
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == b"done\n", f"a fresh process failed: {line!r}"


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill them: a process with MultiWorkerMirroredStrategy survives SIGTERM."""
    for process in processes:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    all_reduce()
    print("done", flush=True)
    time.sleep(600)
