"""What gpudist_core costs beside what one writes by hand, and beside plain Keras: each pair in one host, taken in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import training_sides as sides
from benchmarks.figure import Figure
from emulate.cluster import Cluster, Preload

HAND = "the best loop by hand on tf.distribute"


def figures() -> Iterator[Figure]:
    """All figures about training."""
    for topology in ("1x1", "1x4"):
        name = topology.replace("x", "_")
        yield _at_least(f"own_step_{name}", topology, sides.own_step, 0.97, f"{HAND}, the same batch")
    yield _at_least("fit_1_4", "1x4", sides.fit, 2.5, "plain Keras fit")
    yield _at_least("replicated_1_4", "1x4", sides.replicated, 0.97, "a mirrored variable by hand")
    for topology in ("1x1", "1x4"):
        name = topology.replace("x", "_")
        yield _at_least(
            f"pipeline_{name}", topology, sides.pipeline, 1.0, "tf.data and experimental_distribute_dataset by hand"
        )
    yield from _sharded()


def _sharded() -> Iterator[Figure]:
    """As TensorFlow comes, and with oneDNN on as it is on most Intel CPUs, where its allocator is another.

    The bound is of the whole, as the system counts it, and of the process's own. How many clean pages of TensorFlow's libraries
    are counted with the whole is up to the system: Linux 6.18 maps as much of a library at one touch as lies in one piece in
    its page cache, 82 MB more in all after they were just installed than after they were read from disk.
    """
    peak, before, own, table = _peak()
    yield _gigabytes("sharded_memory", peak, table, 1.3)
    yield _gigabytes("sharded_memory_own", own, table, 1.3)
    yield _gigabytes("sharded_memory_beyond_tensorflow", peak - before, table, None)
    before_that = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    try:
        with Preload() as with_onednn:
            peak, _, _, table = _peak(with_onednn)
    finally:
        del os.environ["TF_ENABLE_ONEDNN_OPTS"]
        os.environ.update({} if before_that is None else {"TF_ENABLE_ONEDNN_OPTS": before_that})
    yield _gigabytes("sharded_memory_onednn", peak, table, 1.3)
    with Preload(imports=False) as fresh:
        peak, _, _, _ = _peak(fresh)
        with Cluster("1x4", preload=fresh) as cluster:
            (array,) = cluster.run(sides.resident_array)
    yield _gigabytes("sharded_memory_fresh", peak, array, None, "a process with TensorFlow and 1 GB of NumPy")


def _peak(preload: Preload | None = None) -> tuple[float, float, float, float]:
    with Cluster("1x4", preload=preload) as cluster:
        (found,) = cluster.run(sides.sharded)
    return found


def _gigabytes(name: str, size: float, other: float, goal: float | None, against: str = "the table itself") -> Figure:
    return Figure(name, size / 1e9, goal, False, size / 1e6, other / 1e6, against, unit="GB", of="MB")


def _at_least(name: str, topology: str, measure: Callable[[], tuple[float, float]], goal: float, against: str) -> Figure:
    with Cluster(topology) as cluster:
        result: Any = cluster.run(measure)[0]
    ours, theirs = result
    return Figure(name, theirs / ours, goal, True, ours, theirs, against)
