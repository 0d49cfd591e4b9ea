"""Memory of a GPU that comes back late is asked for again before a topology is refused or sliced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulate.cluster import ClusterPlan
from emulate.cluster.gpus import GpuHold
from emulate.devices import Inventory
from emulate.devices.lease import ask_until
from emulate.errors import Unavailable
from emulate.topology import Topology
from tests.emulate.devices.made_gpus import gpus


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulate.devices.lease._PAUSE", 0)
    monkeypatch.setattr("emulate.cluster.gpus.what_tensorflow_says", lambda: {"gpus": [{}, {}]})


@pytest.fixture
def plan(tmp_path: Path) -> ClusterPlan:
    return ClusterPlan(Topology(1, 2), lambda context: None, tmp_path, device="gpu")


def answers(monkeypatch: pytest.MonkeyPatch, *free: int) -> Iterator[Inventory]:
    """The driver's answers one after the other: for the lease, and then for the free memory."""
    each = iter([gpus(2, free=one) for one in free])
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: next(each))
    return each


@pytest.mark.parametrize("short", [600, 5_000])
def test_what_the_last_cluster_gives_back_late_is_waited_for(
    short: int, plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulate.cluster.gpus.PATIENCE", 600)
    answers(monkeypatch, short, short, short, 80_000)
    hold = GpuHold.take(plan)
    hold.let_go()
    assert hold.kind == "gpu"
    assert hold.text == "1x2 ran on 2 GPUs (H100), one for each device."


def test_memory_that_does_not_come_back_is_refused_and_the_gpus_are_let_go(
    plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulate.cluster.gpus.PATIENCE", 0)
    for _ in range(2):
        answers(monkeypatch, 600, 600)
        with pytest.raises(Unavailable, match="H100 with 600 MiB free"):
            GpuHold.take(plan)


def test_what_waiting_cannot_better_is_not_waited_for(plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulate.cluster.gpus.PATIENCE", 600)
    rest = answers(monkeypatch, 80_000, 80_000, 80_000)
    GpuHold.take(plan).let_go()
    assert len(list(rest)) == 1


def test_an_answer_that_suffices_is_the_only_one_without_patience() -> None:
    asked = []

    def ask() -> Inventory:
        asked.append(1)
        return gpus(1)

    assert ask_until(ask, lambda found: False, 0) == gpus(1)
    assert ask_until(ask, lambda found: True, 600) == gpus(1)
    assert len(asked) == 2
