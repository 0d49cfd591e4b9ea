"""Strategies use the emulated devices: all of them, or those that a program names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulate.devices.hosts import HostFailed, Hosts, free_ports


def workers(strategy: Any) -> list[str]:
    return [device[-5:] for device in strategy.extended.worker_devices]


@pytest.mark.parametrize(
    "make", ["MirroredStrategy()", "experimental.CentralStorageStrategy()", "MultiWorkerMirroredStrategy()"]
)
def test_a_strategy_uses_all_devices_of_the_host(run: Hosts, make: str) -> None:
    def program() -> Any:
        import tensorflow as tf

        return workers(eval(f"tf.distribute.{make}", {"tf": tf}))

    assert run(program, devices=3) == ["CPU:0", "CPU:1", "CPU:2"]


def test_named_devices_are_used_however_they_are_spelled(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        mirrored = tf.distribute.MirroredStrategy
        lists = [["/gpu:0", "/gpu:2"], ["GPU:1"], ("/device:GPU:3", "gpu:0"), tf.config.list_logical_devices("GPU")[1:]]
        found = [workers(mirrored(devices)) for devices in lists]
        found.append(workers(tf.distribute.OneDeviceStrategy("/gpu:1")))
        central = tf.distribute.experimental.CentralStorageStrategy(["/gpu:0", "/gpu:3"], "/cpu:0")
        found.append([*workers(central), str(central.extended.parameter_devices[0])])
        return found

    assert run(program) == [
        ["CPU:0", "CPU:2"],
        ["CPU:1"],
        ["CPU:3", "CPU:0"],
        ["CPU:1", "CPU:2", "CPU:3"],
        ["CPU:1"],
        ["CPU:0", "CPU:3", "/cpu:0"],
    ]


def test_more_devices_than_the_host_has_is_an_error_that_names_both(run: Hosts) -> None:
    def program() -> None:
        import tensorflow as tf

        tf.distribute.MirroredStrategy(["/gpu:0", "/gpu:1", "/gpu:2"])

    with pytest.raises(HostFailed) as raised:
        run(program, devices=2)
    text = str(raised.value)
    assert "Received: 3 devices ['/gpu:0', '/gpu:1', '/gpu:2'], and this host has GPU:0 to GPU:1 and CPU:0 to CPU:1" in text
    assert "verify on a topology with 3 devices per host" in text


def test_the_reference_has_one_replica_whatever_the_program_names(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        distribute = tf.distribute
        strategies = [
            distribute.MirroredStrategy(["/gpu:0", "/gpu:1"]),
            distribute.MirroredStrategy(["/gpu:2", "/gpu:3"]),
            distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
            distribute.MirroredStrategy(),
            distribute.experimental.CentralStorageStrategy(["/gpu:0", "/gpu:1"], "/cpu:0"),
            distribute.OneDeviceStrategy("/gpu:1"),
        ]
        return [workers(strategy) for strategy in strategies]

    assert run(program, devices=1, reference=True) == [["CPU:0"]] * 6
    assert run.notes == []


def test_hosts_with_several_devices_make_one_replica_of_each(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        seen = tf.config.list_logical_devices("GPU")
        with tf.device("/gpu:1"):
            placed = tf.Variable(1.0).device
        return strategy.num_replicas_in_sync, len(workers(strategy)), seen[-1].name, placed

    first, second = run(program, devices=2, hosts=2)
    assert first[:2] == second[:2] == (4, 2)
    assert first[3] == "/job:worker/replica:0/task:0/device:CPU:1"
    assert second[3] == "/job:worker/replica:0/task:1/device:CPU:1"
    assert second[2].endswith("device:GPU:1")


def test_strategies_of_tensorflow_1_use_them_too(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        distribute = tf.compat.v1.distribute
        return workers(distribute.MirroredStrategy(["/gpu:0", "/gpu:1"])), workers(distribute.OneDeviceStrategy("/gpu:1"))

    assert run(program) == (["CPU:0", "CPU:1"], ["CPU:1"])


def test_a_coordinator_trains_with_parameter_servers(run: Hosts) -> None:
    def program(ports: list[int]) -> Any:
        import json
        import os

        import tensorflow as tf

        jobs = dict(zip(("chief", "worker", "ps"), ([f"localhost:{port}"] for port in ports), strict=True))
        cluster = tf.train.ClusterSpec(jobs)
        servers = [tf.distribute.Server(cluster, job, 0, protocol="grpc") for job in ("worker", "ps")]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}})
        strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            variable = tf.Variable(1.0)

        def replica():  # type: ignore[no-untyped-def]  # AutoGraph cannot read annotations of a pickled function
            return variable.assign_add(1.0, read_value=False)

        @tf.function
        def step():  # type: ignore[no-untyped-def]
            strategy.run(replica)

        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        return float(variable.numpy()), variable.device, len(servers)

    assert run(program, free_ports(3), devices=2) == (4.0, "/job:ps/replica:0/task:0/device:CPU:0", 2)


def test_values_and_inputs_of_replicas_are_where_they_belong(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy(["/gpu:0", "/gpu:1"])
        with strategy.scope():
            variable = tf.Variable(2.0)
        options = tf.distribute.InputOptions(experimental_fetch_to_device=True)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4), options)
        results = [strategy.experimental_local_results(x) for x in data]
        values = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        return (
            [v.device[-5:] for v in strategy.experimental_local_results(variable)],
            [[list(map(int, part)) for part in result] for result in results],
            strategy.experimental_local_results(values),
        )

    assert run(program) == (["CPU:0", "CPU:1"], [[[0, 1], [2, 3]]], (0, 1))
