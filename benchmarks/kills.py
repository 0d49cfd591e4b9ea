"""SIGKILL of any host at random moments: how soon it is reported, with host and step, and what is left.

    python -m benchmarks.kills [COUNT]

Each time a cluster trains, one of its hosts is killed, and the time until the error reaches the caller is taken. The error must
name the host (and the step, once there was one), every other host must be gone, and the next run must be well.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from emulate import Cluster
from emulate.errors import ProgramFailed

TOPOLOGY = "3x1"
MOST_SECONDS = 2.0
MOMENTS = (0.0, 4.0)  # seconds after the last host has started: strategies are made, steps are traced, steps are run


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        host: Which one.
        moment: Seconds after the start of all hosts.
        seconds: Until the error was there.
        step: The step that it named.
    """

    host: int
    moment: float
    seconds: float
    step: int | None


def train(folder: str) -> None:
    """Train for ever; runs on each host."""
    import json

    host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    Path(folder, f"{host}.part").write_text(str(os.getpid()))
    os.rename(Path(folder, f"{host}.part"), Path(folder, f"{host}.pid"))
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def body(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x: strategy.run(body, (x,)))
    while True:
        step(tf.ones([8, 64]))


class Killer(threading.Thread):
    """Kills a host at its moment."""

    def __init__(self, folder: Path, host: int, moment: float, num_hosts: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._host, self._moment, self._num_hosts = folder, host, moment, num_hosts
        self.at = 0.0
        self.pids: list[int] = []

    def run(self) -> None:
        """Wait for all hosts, then for the moment."""
        while len(found := sorted(self._folder.glob("*.pid"))) < self._num_hosts:
            time.sleep(0.002)
        self.pids = [int(path.read_text()) for path in found]
        time.sleep(self._moment)
        self.at = time.monotonic()
        os.kill(self.pids[self._host], signal.SIGKILL)


def kill_once(cluster: Cluster, host: int, moment: float) -> Kill:
    """One kill, all that is asked of it checked.

    Args:
        cluster: Where.
        host: Which host.
        moment: Seconds after the start of all hosts.

    Returns:
        What came of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), host, moment, cluster.topology.num_hosts)
        killer.start()
        try:
            cluster.run(train, folder)
        except ProgramFailed as error:
            seconds, text, named = time.monotonic() - killer.at, str(error), error.host
        killer.join()
    assert named == host, text
    assert f"host {host} ended with signal 9" in text, text
    assert not any(psutil.pid_exists(pid) for pid in killer.pids)
    assert cluster.run(os.getpid), "the next run is well"
    after = text.partition("instead after step ")[2].partition(".")[0]
    return Kill(host, moment, seconds, int(after) if after else None)


def kills(count: int, topology: str = TOPOLOGY, moments: tuple[float, float] = MOMENTS) -> list[Kill]:
    """So many kills of hosts chosen by chance at moments chosen by chance.

    Args:
        count: How many.
        topology: Of which cluster.
        moments: The earliest and the latest, in seconds after the start of all hosts.

    Returns:
        All of them.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    chance, done = random.Random(0), []
    with Cluster(topology) as cluster:
        for number in range(count):
            host = chance.randrange(cluster.topology.num_hosts)
            done.append(kill_once(cluster, host, chance.uniform(*moments)))
            print(f"{number + 1}: {done[-1]}", file=sys.stderr, flush=True)
    return done


def main() -> int:
    """Print the distribution; exit code 1 when one took longer than it may."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    times = sorted(kill.seconds for kill in kills(count))
    marks = {"least": 0.0, "median": 0.5, "90%": 0.9, "most": 1.0}
    shown = ", ".join(f"{name} {times[min(count - 1, int(at * count))]:.3f} s" for name, at in marks.items())
    print(f"{count} kills on {TOPOLOGY}, reported after: {shown} (at most {MOST_SECONDS:g} s are allowed)")
    return 0 if times[-1] <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
