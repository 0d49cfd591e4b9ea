"""Clusters by the hundred, one after the other and several at a time: what is left of them on this machine when they are over.

    python -m benchmarks.endurance [--clusters 300] [--at-once 4] [--topologies 2x1,1x2,1x1,3x1] [--pool]

Exit code 1 when a cluster failed, or when a process, port, descriptor, temporary file or namespace was left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from emulate import Pool
from emulate.cluster import Cluster, HostContext, Preload

_SETTLES = 10.0  # seconds in which what ends in the background must have ended


def total() -> float:
    """A sum over all replicas."""
    import tensorflow as tf

    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()
    function = tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None))
    return float(function())


def total_of(context: HostContext) -> float:
    return total()


@dataclass
class Snapshot:
    """What there is of what a cluster might leave.

    Attributes:
        processes: This one and all that came from it, whoever is their parent now.
        ports: On which they listen.
        descriptors: Open ones of this process and of its pre-loaded parent.
        files: Temporary ones of ours.
        namespaces: In which those processes are, and those that a mount or a descriptor of theirs holds.
        memory: MB of this process and of its pre-loaded parent.
    """

    processes: set[int] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    descriptors: int = 0
    files: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    memory: float = 0.0

    @classmethod
    def take(cls, preload: Preload) -> Snapshot:
        family = list(_family())
        me = psutil.Process()
        parents = [me, *me.children()]
        return cls(
            {one.pid for one in family},
            {found.laddr.port for one in family for found in _connections(one) if found.status == psutil.CONN_LISTEN},
            sum(one.num_fds() for one in parents),
            {str(path) for place in (Path(tempfile.gettempdir()), preload.directory) for path in place.iterdir()},
            set(_namespaces(family)),
            sum(one.memory_full_info().uss for one in parents) / 1e6,
        )

    def leaked(self, before: Snapshot) -> list[str]:
        """What there is more than before."""
        more = {name: getattr(self, name) - getattr(before, name) for name in ("processes", "ports", "files", "namespaces")}
        found = [f"{len(those)} {name}: {', '.join(map(str, sorted(those)))}" for name, those in more.items() if those]
        if self.descriptors > before.descriptors:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        return found


def _connections(process: psutil.Process) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return list(process.net_connections("inet"))
    return []


def _family() -> Iterator[psutil.Process]:
    """A process that left its parents behind still has the environment that they were started with."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get("TMPDIR", "").startswith(tempfile.gettempdir()):
                yield process


def _namespaces(family: list[psutil.Process]) -> Iterator[str]:
    for process in family:
        place = Path(f"/proc/{process.pid}")
        for link in itertools.chain(place.glob("ns/*"), place.glob("fd/*")):
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith(("net:", "user:", "mnt:")):
                    yield target
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if " nsfs " in line:
            yield line.split()[3]


def run_clusters(preload: Preload, topologies: list[str], number: int, at_once: int) -> list[str]:
    """Run a sum on so many fresh clusters; what failed."""

    def one(topology: str) -> None:
        with Cluster(topology, preload=preload, timeout=120) as cluster:
            results = cluster.run(total)
        replicas = cluster.topology.num_replicas
        assert results == [replicas] * cluster.topology.num_hosts, results

    return _run(one, topologies, number, at_once)


def run_pool(preload: Preload, topologies: list[str], number: int, at_once: int) -> list[str]:
    """The same through a pool, each on a cluster that has run nothing."""
    with Pool(preload=preload, max_hosts=4) as pool:

        def one(topology: str) -> None:
            with pool.lease(topology, fresh=True) as lease:
                results = lease.run(total_of, timeout=120)
            assert [result.value for result in results] == [lease.topology.num_replicas] * lease.topology.num_hosts, results

        return _run(one, topologies, number, at_once)


def _run(one: Callable[[str], None], topologies: list[str], number: int, at_once: int) -> list[str]:
    failures: list[str] = []
    done = itertools.count(1)
    lock = threading.Lock()

    def guarded(topology: str) -> None:
        try:
            one(topology)
        except Exception as error:
            failures.append(f"{topology}: {type(error).__name__}: {error}")
        with lock:
            if (count := next(done)) % 50 == 0:
                print(f"  {count} of {number}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(at_once) as executor:
        list(executor.map(guarded, itertools.islice(itertools.cycle(topologies), number)))
    return failures


def measure(
    run: Callable[[Preload, list[str], int, int], list[str]], topologies: list[str], number: int, at_once: int
) -> tuple[list[str], str]:
    """Run clusters and look for what they left.

    Returns:
        What failed or leaked, and a line that says how it went.
    """
    with Preload() as preload:
        problems = run(preload, topologies, len(topologies), at_once)  # what comes with the first use stays
        time.sleep(0.5)
        before = Snapshot.take(preload)
        started = time.monotonic()
        problems += run(preload, topologies, number, at_once)
        seconds = time.monotonic() - started
        deadline = time.monotonic() + _SETTLES
        while (leaked := Snapshot.take(preload).leaked(before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        after = Snapshot.take(preload)
        directory = preload.directory
    problems += leaked + ([f"1 folder: {directory}"] if directory.exists() else [])
    line = (
        f"{number} clusters ({', '.join(topologies)}), {at_once} at a time: {seconds:.0f} s, {seconds / number:.2f} s each; "
        f"memory {before.memory:.0f} -> {after.memory:.0f} MB; {'nothing left' if not leaked else 'LEFT: ' + '; '.join(leaked)}"
    )
    return problems, line


def main() -> int:
    """Measure one after the other, then several at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--topologies", default="2x1,1x2,1x1,3x1")
    parser.add_argument("--pool", action="store_true", help="lease them from a pool")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    run = run_pool if options.pool else run_clusters
    failed = False
    with own_temporary_folder():
        for at_once in (1, options.at_once):
            problems, line = measure(run, options.topologies.split(","), options.clusters, at_once)
            print(line, flush=True)
            for problem in problems:
                print(f"  {problem}", flush=True)
            failed = failed or bool(problems)
    return int(failed)


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Have all temporary files in a folder of our own, by which our processes are known too."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        try:
            yield
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


if __name__ == "__main__":
    sys.exit(main())
