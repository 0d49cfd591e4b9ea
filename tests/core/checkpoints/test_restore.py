"""A run that was killed or told to leave goes on as if nothing had been, on the same topology or another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.cluster import Cluster, Preload
from emulate.errors import ProgramFailed
from tests.core.checkpoints.training import train

OnHosts = Callable[..., list[Any]]
STEPS = 17


@pytest.fixture(scope="module")
def never_killed(preload: Preload, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A run on a topology without any interruption, made once."""

    @functools.cache
    def run(topology: str) -> dict[str, Any]:
        with Cluster(topology, preload=preload, timeout=120) as cluster:
            return dict(cluster.run(train, str(tmp_path_factory.mktemp(topology)))[0])

    return run


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["values"].keys() == other["values"].keys()
    return max(float(np.max(np.abs(a.astype("float64") - other["values"][name]))) for name, a in one["values"].items())


# Legs of a run, one after the other: where, and which hosts are told to leave after which step (or the first one "killed").
RUNS: dict[str, list[tuple[str, Any, int]]] = {
    "one host": [("1x3", "killed", 12), ("1x3", (0,), 12), ("1x3", (), 0)],
    "two hosts": [("2x1", "killed", 11), ("2x1", (1,), 12), ("2x1", (), 0)],
    "three topologies": [("1x3", "killed", 7), ("2x2", (0, 1), 8), ("1x2", (), 0)],
}


@pytest.mark.parametrize(
    "run", [pytest.param(name, marks=() if name == "three topologies" else pytest.mark.slow) for name in RUNS]
)
def test_what_was_killed_and_told_to_leave_is_never_interrupted(
    on_hosts: OnHosts, never_killed: Callable[[str], dict[str, Any]], tmp_path: Path, run: str
) -> None:
    folder, starts, last = str(tmp_path / "run"), [0], {}
    for topology, end, at in RUNS[run]:
        if end == "killed":
            with pytest.raises(ProgramFailed, match="signal 9"):
                on_hosts(topology, train, folder, at)
            starts.append(at - at % 5)
        elif end:
            starts.append(left_together(on_hosts(topology, train, folder, 0, STEPS, end, at), at))
        else:
            last = on_hosts(topology, train, folder)[0]
    topologies = [topology for topology, *_ in RUNS[run]]
    whole = never_killed(topologies[0])
    assert (whole["from"], whole["names"]) == (0, ["step-00000010", "step-00000015"])
    assert (last["from"], last["pending"], whole["pending"]) == (starts[-1], 1, 1)
    # Between two updates the sums that replicas have accumulated are kept as their total, which adds up in another order.
    is_exact = len(set(topologies)) == 1 and all(start % 2 == 0 for start in starts)
    difference = largest_difference(whole, last)
    assert difference == 0 if is_exact else difference < 1e-6
    if len(set(topologies)) == 1:
        assert (last["seen"], last["drawn"]) == (whole["seen"], whole["drawn"])
    # Each replica adds one to a sum in each step: what those of an earlier leg had added stays, whatever their number was.
    replicas = [int(np.prod([int(n) for n in topology.split("x")])) for topology in topologies]
    lengths = np.diff([*starts, STEPS])
    assert last["seen"] == int(np.sum(lengths * replicas))


def left_together(left: list[dict[str, Any]], at: int) -> int:
    """The one step after which all hosts left."""
    (step,) = {result["step"] for result in left}
    assert all(result["code"] == 75 for result in left)
    assert at <= step <= at + 3
    assert left[0]["text"].startswith(f"This run was told to stop after step {step}. Start it again to continue from ")
    return int(step)


def told_before_the_first_step(folder: str) -> int:
    """After which step all hosts left."""
    import os
    import signal

    import tensorflow as tf

    import gpudist_core as gd

    strategy = gd.make_strategy()
    with strategy.scope():
        count = tf.Variable(0)
    checkpoints = gd.Checkpoints(folder, extra={"count": count}, strategy=strategy)
    checkpoints.restore()
    if strategy.cluster_resolver.task_id == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        for step in range(1, 1000):
            checkpoints.after_step(step)
    except gd.Preempted as left:
        return left.step
    return 1000


def test_who_is_told_to_leave_before_the_first_step_ends_leaves_too(on_hosts: OnHosts, tmp_path: Path) -> None:
    first, second = on_hosts("2x1", told_before_the_first_step, str(tmp_path / "run"))
    assert first == second < 1000
