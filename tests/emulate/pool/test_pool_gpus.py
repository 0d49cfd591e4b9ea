"""On GPUs, which serve one cluster at a time, a pool lets go of idle clusters before it needs the GPUs for another."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from emulate.cluster import Pool
from emulate.cluster.gpus import GpuHold
from emulate.cluster.plan import roles_of
from emulate.devices import DeviceChoice
from emulate.errors import Unavailable, UsageError
from emulate.topology import Topology
from tests.emulate.devices.made_gpus import gpu, inventory


class Gpus:
    """Made-up clusters that hold the one GPU until they have ended."""

    def __init__(self) -> None:
        self.held_by: Any = None

    def cluster(self, preload: Any, topology: Topology, device: str, options: Any) -> Any:
        hold = GpuHold.take(SimpleNamespace(topology=topology)) if device == "gpu" else None  # type: ignore[arg-type]
        made = SimpleNamespace(
            topology=topology,
            device=device,
            hosts=range(topology.num_hosts),
            num_jobs=0,
            unfit="",
            scope=None,
            settle=lambda: "",
            reject=print,
            running=running(topology, hold),
            end=lambda: self.let_go(hold),
        )
        if hold:
            assert self.held_by is None
            self.held_by = made
        return made

    def let_go(self, hold: GpuHold | None) -> None:
        if hold:
            self.held_by = None
            hold.let_go()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made, there = Gpus(), inventory(gpu(77))
    monkeypatch.setattr("emulate.cluster.pool.Session", made.cluster)
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: there)
    monkeypatch.setattr(
        "emulate.cluster.pool.choose_device", lambda device, topologies: DeviceChoice("cpu" if device == "cpu" else "gpu")
    )
    return made


def running(topology: Topology, hold: GpuHold | None) -> Any:
    """What is known of its processes before there are any."""
    about = {"device": hold.kind, "adopt": hold.adopt} if hold else {"device": "emulated", "adopt": lambda: None}
    return SimpleNamespace(roles=roles_of(topology), notes=[], name=str, **about)


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


@pytest.mark.parametrize(
    ("device", "topology", "kind"),
    [
        ("cpu", Topology(1, 2), "emulated"),
        ("gpu", Topology(1, 1), "gpu"),
        ("gpu", Topology(1, 2), "gpu slice"),
        ("gpu", Topology(1, 1, 1), "gpu"),
    ],
)
def test_a_lease_says_what_the_hosts_that_train_compute_on(gpus: Gpus, device: str, topology: Topology, kind: str) -> None:
    with pool_on(device) as pool, pool.lease(topology) as lease:
        assert lease.device == kind


def test_whoever_runs_beside_the_pool_can_have_them(gpus: Gpus) -> None:
    with pool_on("gpu") as pool:
        pool.give_back(pool.take(Topology(1, 2)))
        assert gpus.held_by is not None
        pool.let_go_of_gpus()
        assert gpus.held_by is None


def test_a_cluster_beside_the_pool_has_them_of_itself(gpus: Gpus) -> None:
    with pool_on("gpu") as pool:
        pool.give_back(pool.take(Topology(1, 2)))
        beside = gpus.cluster(None, Topology(1, 1), "gpu", None)
        assert gpus.held_by is beside
        beside.end()


def test_of_a_cluster_that_is_leased_nobody_of_the_same_thread_has_them(gpus: Gpus) -> None:
    with pool_on("gpu") as pool:
        leased = pool.take(Topology(1, 2))
        with pytest.raises(Unavailable, match="of the same thread"):
            gpus.cluster(None, Topology(1, 1), "gpu", None)
        assert gpus.held_by is leased


def test_two_threads_that_share_a_pool_have_them_one_after_the_other(gpus: Gpus) -> None:
    for shape in (Topology(1, 2), Topology(2, 1)):
        with pool_on("gpu") as pool, ThreadPoolExecutor(1) as other:
            first = pool.take(Topology(1, 2))
            second = other.submit(pool.take, shape)
            time.sleep(0.1)
            assert not second.done()
            pool.give_back(first)
            assert second.result(timeout=20) is gpus.held_by


def test_a_thread_waits_for_a_cluster_that_it_started_and_another_thread_runs(gpus: Gpus) -> None:
    with pool_on("gpu") as pool, ThreadPoolExecutor(1) as other:
        pool.give_back(pool.take(Topology(1, 2)))
        leased = other.submit(pool.take, Topology(1, 2)).result(timeout=20)
        threading.Timer(0.1, pool.give_back, [leased]).start()
        assert gpus.held_by is leased
        assert pool.take(Topology(2, 1)) is gpus.held_by


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
    with pytest.raises(UsageError, match=r"device must be one of cpu, gpu, auto\. Received: device='tpu'"):
        pool_on("tpu")
