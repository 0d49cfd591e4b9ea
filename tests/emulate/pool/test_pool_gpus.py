"""On GPUs, which serve one cluster at a time, a pool lets go of idle clusters before it needs the GPUs for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emulate.devices import DeviceChoice
from emulate.errors import WrongUse
from emulate.pool import Pool
from emulate.topology import Topology


class Gpus:
    """Made-up clusters that hold the one GPU until they have ended."""

    def __init__(self) -> None:
        self.held_by: Any = None

    def cluster(self, preload: Any, topology: Topology, options: Any, device: str) -> Any:
        assert self.held_by is None
        made = SimpleNamespace(
            topology=topology,
            device=device,
            hosts=range(topology.num_hosts),
            num_jobs=0,
            unfit="",
            is_of_bare_process=False,
            settle=lambda: "",
            end=self.let_go,
        )
        self.held_by = made if device == "gpu" else None
        return made

    def let_go(self) -> None:
        self.held_by = None


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made = Gpus()
    monkeypatch.setattr("emulate.pool.pool.WarmCluster", made.cluster)
    monkeypatch.setattr(
        "emulate.pool.pool.choose_device", lambda device, topologies: DeviceChoice("cpu" if device == "cpu" else "gpu")
    )
    return made


def pool_on(device: str, **options: Any) -> Pool:
    return Pool(device=device, preload=SimpleNamespace(close=lambda: None), **options)  # type: ignore[arg-type]


def test_a_cluster_on_gpus_stays_warm_until_another_shape_needs_them(gpus: Gpus) -> None:
    with pool_on("auto") as pool:
        first = pool.take(Topology(1, 2))
        pool.give_back(first)
        assert pool.take(Topology(1, 2)) is first
        pool.give_back(first)
        second = pool.take(Topology(2, 1))
        assert gpus.held_by is second
        pool.give_back(second)
    assert gpus.held_by is None


def test_whoever_runs_beside_the_pool_can_have_them(gpus: Gpus) -> None:
    with pool_on("gpu") as pool:
        pool.give_back(pool.take(Topology(1, 2)))
        assert gpus.held_by is not None
        pool.let_go_of_gpus()
        assert gpus.held_by is None


def test_where_other_processes_wait_nothing_on_gpus_stays_warm(gpus: Gpus) -> None:
    with pool_on("gpu", keeps_gpus=False) as pool:
        pool.give_back(pool.take(Topology(1, 2)))
        pool.let_go_of_gpus()  # it is ended in the background
        assert gpus.held_by is None
        assert pool.take(Topology(1, 2)).num_jobs == 0


def test_clusters_on_the_cpu_are_left_alone(gpus: Gpus) -> None:
    with pool_on("cpu", keeps_gpus=False) as pool:
        first = pool.take(Topology(1, 2))
        pool.give_back(first)
        pool.let_go_of_gpus()
        assert pool.take(Topology(1, 2)) is first


def test_another_kind_of_device_is_wrong_use() -> None:
    with pytest.raises(WrongUse, match=r"device must be one of cpu, gpu, auto\. Received: device='tpu'"):
        pool_on("tpu")
