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
def never_killed(loaded: Preload, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A run on a topology without any interruption, made once."""

    @functools.cache
    def run(topology: str) -> dict[str, Any]:
        with Cluster(topology, preload=loaded, timeout=120) as cluster:
            return dict(cluster.run(train, str(tmp_path_factory.mktemp(topology)))[0])

    return run


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["values"].keys() == other["values"].keys()
    return max(float(np.max(np.abs(a.astype("float64") - other["values"][name]))) for name, a in one["values"].items())


@pytest.mark.parametrize(
    ("before", "after", "kill_at"),
    [("1x4", "1x4", 12), ("1x4", "2x2", 7), ("2x2", "1x2", 16), ("2x1", "2x1", 11)],
)
def test_killed_and_restored_is_never_killed(
    on_hosts: OnHosts, never_killed: Callable[[str], dict[str, Any]], tmp_path: Path, before: str, after: str, kill_at: int
) -> None:
    whole = never_killed(before)
    assert (whole["from"], whole["names"]) == (0, ["step-00000010", "step-00000015"])
    with pytest.raises(ProgramFailed, match="signal 9"):
        on_hosts(before, train, str(tmp_path / "killed"), kill_at)
    rest = on_hosts(after, train, str(tmp_path / "killed"))
    assert rest[0]["from"] == kill_at - kill_at % 5
    assert rest[0]["pending"] == whole["pending"] == 1
    difference = largest_difference(whole, rest[0])
    assert difference == 0 if before == after and rest[0]["from"] % 2 == 0 else difference < 1e-6
    if before == after:
        assert (rest[0]["seen"], rest[0]["drawn"]) == (whole["seen"], whole["drawn"])
    # Each replica adds one to a sum in each step: what the first run's had added stays, whatever their number was.
    replicas = [int(np.prod([int(n) for n in topology.split("x")])) for topology in (before, after)]
    start = rest[0]["from"]
    assert rest[0]["seen"] == start * replicas[0] + (STEPS - start) * replicas[1]


@pytest.mark.parametrize(("topology", "told", "at"), [("1x4", (0,), 8), ("2x1", (1,), 8), ("2x2", (0, 1), 3)])
def test_a_signal_to_any_host_stops_all_at_one_step(
    on_hosts: OnHosts,
    never_killed: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    topology: str,
    told: tuple[int, ...],
    at: int,
) -> None:
    whole = never_killed(topology)
    left = on_hosts(topology, train, str(tmp_path / "told"), 0, STEPS, told, at)
    assert len({result["step"] for result in left}) == 1
    assert all(result["code"] == 75 for result in left)
    assert at <= left[0]["step"] <= at + 3
    assert left[0]["text"].startswith(f"This run was told to leave after step {left[0]['step']}. Start it again to go on from ")
    rest = on_hosts(topology, train, str(tmp_path / "told"))[0]
    assert rest["from"] == left[0]["step"]
    difference = largest_difference(whole, rest)
    # Between two updates the sums that replicas have accumulated are kept as their total, which adds up in another order.
    assert difference == 0 if rest["from"] % 2 == 0 else difference < 1e-6
