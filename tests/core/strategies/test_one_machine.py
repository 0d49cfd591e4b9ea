"""On one machine: the strategy fits the devices, sums as wished, and leaves the other strategies of the process alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.conftest import OnHosts
from tests.core.strategies.conftest import Plain


def _look(strategy: Any) -> tuple[str, list[str], str]:
    operation = getattr(strategy.extended, "_cross_device_ops", None)
    devices = [name.rpartition("device:")[2] for name in strategy.extended.worker_devices]
    return type(strategy).__name__, devices, type(operation).__name__


def _strategies(split: int, wishes: list[dict[str, Any]]) -> list[Any]:
    import gpudist_core as gd
    from tests.core.strategies.sums import split_cpu, total

    if split:
        split_cpu(split)
    made = [(gd.make_strategy(**wish)) for wish in wishes]
    return [(*_look(strategy), total(strategy)) for strategy in made]


def _errors(split: int, wishes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    import gpudist_core as gd
    from tests.core.strategies.sums import error_of, split_cpu

    if split:
        split_cpu(split)
    return [error_of(gd.make_strategy, **wish) for wish in wishes]


def test_a_machine_without_gpus_is_one_cpu(plain: Plain) -> None:
    wishes = [{}, {"kind": "mirrored"}, {"devices": ["CPU:0"]}, {"kind": "mirrored", "all_reduce": "hierarchical"}]
    cpu = ["CPU:0"]
    assert plain(_strategies, 0, wishes) == [
        ("OneDeviceStrategy", cpu, "NoneType", [1.0]),
        ("MirroredStrategy", cpu, "ReductionToOneDevice", [1.0]),
        ("OneDeviceStrategy", cpu, "NoneType", [1.0]),
        ("MirroredStrategy", cpu, "ReductionToOneDevice", [1.0]),
    ]


def test_logical_cpus_that_the_user_made_are_used_and_summed_as_wished(plain: Plain) -> None:
    wishes = [
        {},
        {"devices": 2},
        {"devices": ["CPU:1", "/cpu:3"], "all_reduce": "ring"},
        {"all_reduce": "ring", "bytes_per_pack": 1000},
        {"all_reduce": "hierarchical"},
        {"devices": 3, "all_reduce": "one-device"},
        {"kind": "central-storage"},
        {"kind": "one-device"},
        {"devices": "/device:CPU:2"},
    ]
    four = [f"CPU:{i}" for i in range(4)]
    assert plain(_strategies, 4, wishes) == [
        ("MirroredStrategy", four, "ReductionToOneDevice", [10.0] * 4),
        ("MirroredStrategy", four[:2], "ReductionToOneDevice", [3.0] * 2),
        ("MirroredStrategy", ["CPU:1", "CPU:3"], "CollectiveAllReduce", [3.0] * 2),
        ("MirroredStrategy", four, "CollectiveAllReduce", [10.0] * 4),
        ("MirroredStrategy", four, "HierarchicalCopyAllReduce", [10.0] * 4),
        ("MirroredStrategy", four[:3], "ReductionToOneDevice", [6.0] * 3),
        ("CentralStorageStrategy", four, "ReductionToOneDevice", [10.0] * 4),
        ("OneDeviceStrategy", four[:1], "NoneType", [1.0]),
        ("OneDeviceStrategy", ["CPU:2"], "NoneType", [1.0]),
    ]


def test_strategies_of_different_sizes_train_side_by_side(plain: Plain) -> None:
    def both() -> list[list[float]]:
        import gpudist_core as gd
        from tests.core.strategies.sums import split_cpu, trained

        split_cpu(4)
        first = trained(gd.make_strategy(all_reduce="ring"))
        first()
        second = trained(gd.make_strategy(devices=2, all_reduce="ring"))
        third = trained(gd.make_strategy(devices=3))
        second()
        third()
        return [train() for train in (first, second, third, first, second, third)]

    weights = plain(both)
    assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    assert weights[0] == pytest.approx(weights[2], rel=1e-5)
    assert weights[3] == pytest.approx(weights[4], rel=1e-5)
    assert weights[3] == pytest.approx(weights[5], rel=1e-5)
    assert weights[0] != weights[3]


def test_the_sum_that_is_chosen_works_inside_a_loop(plain: Plain) -> None:
    def looped() -> list[float]:
        import gpudist_core as gd
        from tests.core.strategies.sums import split_cpu, total

        split_cpu(3)
        return total(gd.make_strategy(), repeats=3)

    assert plain(looped) == [6.0] * 3


_ADVICE = "It has 0 GPUs and 4 CPU devices. Name these, or leave devices out."
_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"devices": 5}, "devices must exist on this machine. Received: devices=5. " + _ADVICE),
    ({"devices": "GPU:0"}, "devices must exist on this machine. Received: devices=['GPU:0']. " + _ADVICE),
    ({"devices": ["CPU:7"]}, "devices must exist on this machine. Received: devices=['CPU:7']. " + _ADVICE),
    (
        {"devices": 1.5},
        'devices must be a number or a list of names. Received: devices=1.5. Use devices=2 or devices=["GPU:0"].',
    ),
    (
        {"time_each_collective": 1},
        "time_each_collective must be True or False. Received: time_each_collective=1. Leave it out.",
    ),
    (
        {"timeout_seconds": "3"},
        "timeout_seconds must be a positive number or None. Received: timeout_seconds='3'. Leave it out.",
    ),
    ({"devices": 0}, "devices must hold at least one device. Received: devices=0. Leave devices out for all."),
    (
        {"devices": []},
        "devices must hold at least one device, and each device once. Received: devices=[]. Leave devices out for all.",
    ),
    (
        {"devices": ["CPU:0", "/cpu:0"]},
        (
            "devices must hold at least one device, and each device once. Received: devices=['CPU:0', '/cpu:0']. Leave devices "
            "out for all."
        ),
    ),
    (
        {"devices": "TPU:0"},
        "A device name must have the form \"GPU:0\". Received: device='TPU:0'. Name a GPU or a CPU of this machine.",
    ),
    ({"devices": [3]}, 'A device name must have the form "GPU:0". Received: device=3. Name a GPU or a CPU of this machine.'),
    (
        {"kind": "one-device", "devices": 2},
        "kind='one-device' needs exactly one device. Received: devices=2, kind='one-device'. Pass one device.",
    ),
    (
        {"devices": 3, "all_reduce": "hierarchical"},
        (
            "TensorFlow's HierarchicalCopyAllReduce needs an even number of devices: with an odd number it drops one. "
            "Received: devices=('CPU:0', 'CPU:1', 'CPU:2'). Use all_reduce=\"one-device\" or \"auto\", or an even number of "
            "devices."
        ),
    ),
    (
        {"devices": 2, "all_reduce": "nccl"},
        (
            "NCCL needs GPUs that are separate pieces of hardware. Received: devices=('CPU:0', 'CPU:1'). Use "
            'all_reduce="auto", which reduces to one device here.'
        ),
    ),
    (
        {"all_reduce": "tree"},
        "all_reduce must be one of auto, nccl, ring, hierarchical, one-device. Received: all_reduce='tree'.",
    ),
    (
        {"kind": "tpu"},
        (
            "kind must be one of auto, one-device, mirrored, central-storage, multi-worker, parameter-server. Received: "
            "kind='tpu'."
        ),
    ),
    (
        {"kind": "central-storage", "all_reduce": "ring"},
        "Central storage must sum on the device that holds the variables. Received: all_reduce='ring'. Leave all_reduce out.",
    ),
    (
        {"bytes_per_pack": 100},
        (
            "On one machine, bytes_per_pack needs a ring. Received: bytes_per_pack=100, all_reduce='auto'. Leave "
            'bytes_per_pack out, or use all_reduce="ring".'
        ),
    ),
    (
        {"bytes_per_pack": 0, "all_reduce": "ring"},
        "bytes_per_pack must be a positive integer or None. Received: bytes_per_pack=0. Leave it out.",
    ),
    ({"timeout_seconds": -1}, "timeout_seconds must be a positive number or None. Received: timeout_seconds=-1. Leave it out."),
    (
        {"kind": "multi-worker"},
        (
            "A cluster must come from TF_CONFIG, from a Slurm step or from the argument cluster. Received: "
            "kind='multi-worker'. Configure the cluster, or leave kind out."
        ),
    ),
    (
        {"cluster": 3},
        (
            "cluster must be a cluster resolver, a tf.train.ClusterSpec or a dictionary in the form of TF_CONFIG. Received: "
            "cluster=3."
        ),
    ),
]


def test_what_cannot_be_meant_is_refused_with_what_is_possible(plain: Plain) -> None:
    assert plain(_errors, 4, [wish for wish, _ in _WRONG]) == [("UsageError", text) for _, text in _WRONG]


def test_horovod_is_named_honestly(plain: Plain) -> None:
    [(kind, text)] = plain(_errors, 0, [{"all_reduce": "horovod"}])
    assert kind == "Unavailable"
    assert text.startswith("Horovod is not supported: its last release, 0.28.1 of 2023, does not build against")
    assert text.endswith('Use all_reduce="nccl", which Horovod also uses on GPUs, or "ring".')


def test_emulated_gpus_are_found_and_the_users_own_parts_of_one_too(on_hosts: OnHosts) -> None:
    def hosts(parts: int) -> Any:
        import tensorflow as tf

        import gpudist_core as gd
        from gpudist_core.environments import shares_hardware
        from tests.core.strategies.sums import total

        if parts:
            configuration = [tf.config.LogicalDeviceConfiguration(memory_limit=100) for _ in range(parts)]
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], configuration)
        here = gd.environment()
        return (
            str(here),
            shares_hardware(here.devices),
            total(gd.make_strategy()),
            total(gd.make_strategy(devices=["GPU:1", "GPU:0"])),
        )

    [three] = on_hosts("1x3", hosts, 0)
    assert three == (
        "mirrored: worker, 1 host, 3 devices (GPU:0, GPU:1, GPU:2), says this machine",
        False,
        [6.0] * 3,
        [3.0] * 2,
    )
    [split] = on_hosts("1x1", hosts, 4)
    assert split == ("mirrored: worker, 1 host, 4 devices (GPU:0 to GPU:3), says this machine", True, [10.0] * 4, [3.0] * 2)
