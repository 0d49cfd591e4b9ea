# ruff: noqa: E501 (a message is easier to read on one line)
"""On several hosts: one model on all, from TF_CONFIG, Slurm or a cluster given, and a word when a host is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.conftest import OnHosts
from tests.emulate.devices.hosts import ROOT, free_ports


def _made(source: str) -> Any:
    import json
    import os

    import tensorflow as tf

    import gpudist_core as gd
    from tests.core.strategies.sums import error_of, total

    config = json.loads(os.environ["TF_CONFIG"])
    cluster: Any = None
    if source == "resolver":
        spec = tf.train.ClusterSpec(config["cluster"])
        task = config["task"]
        cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=task["type"], task_id=task["index"])
    elif source == "dictionary":
        cluster = config
    here = gd.environment(cluster)
    lonely = error_of(gd.make_strategy, "mirrored", cluster=cluster)
    fewer = error_of(gd.make_strategy, cluster=cluster, devices=1)
    packed = error_of(gd.make_strategy, cluster=cluster, all_reduce="hierarchical")
    servers = error_of(gd.make_strategy, "parameter-server", cluster=cluster)
    strategy = gd.make_strategy(cluster=cluster, bytes_per_pack=10_000)
    again = gd.make_strategy(cluster=cluster)
    return str(here), total(strategy), total(again), [lonely, fewer, packed, servers]


@pytest.mark.parametrize(("topology", "source"), [("2x2", "TF_CONFIG"), ("2x1", "resolver"), ("2x1", "dictionary")])
def test_several_hosts_train_one_model(on_hosts: OnHosts, topology: str, source: str) -> None:
    number = int(topology[-1])
    devices = "2 devices (GPU:0, GPU:1)" if number == 2 else "1 device (GPU:0)"
    says = source if source == "TF_CONFIG" else "the cluster given"
    for host, (here, sums, again, errors) in enumerate(on_hosts(topology, _made, source)):
        assert here == f"multi-worker: worker, host {host} of 2, {devices}, says {says}"
        assert sums == again == [number * (2 * number + 1.0)] * number
        assert errors == [
            (
                "UsageError",
                (
                    f"In a cluster of 2 tasks, all tasks must train one model ({says}). Received: kind='mirrored'. Leave kind out. For a "
                    "separate model on each host, unset TF_CONFIG (in Slurm: SLURM_STEP_NUM_TASKS)."
                ),
            ),
            (
                "UsageError",
                (
                    "The hosts of a cluster must use all their devices. Received: devices=1. Hide devices with tf.config.set_visible_devices."
                ),
            ),
            (
                "UsageError",
                (
                    'all_reduce between hosts must be a ring or NCCL. Received: all_reduce=\'hierarchical\'. Use all_reduce="auto", "ring" or "nccl".'
                ),
            ),
            (
                "UsageError",
                (
                    "A cluster without ps tasks needs a multi-worker strategy. Received: kind='parameter-server', jobs=['worker']. Leave kind out, or change the cluster."
                ),
            ),
        ]


def test_a_host_that_never_starts_is_an_error_that_names_it(on_hosts: OnHosts) -> None:
    def missing() -> Any:
        import json
        import os

        import gpudist_core as gd
        from tests.core.strategies.sums import error_of

        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["index"] == 2:
            return None
        return config["cluster"]["worker"][2], *error_of(gd.make_strategy, timeout_seconds=1)

    *alive, gone = on_hosts("3x1", missing)
    assert gone is None
    for address, kind, text in alive:
        assert kind == "Unavailable"
        assert (
            f"1 of 2 other tasks never answered: worker 2 at {address} (Connection refused). Start the program there too"
            in text
        )


def test_a_host_that_stays_away_from_a_sum_is_an_error(on_hosts: OnHosts) -> None:
    def lazy() -> Any:
        import time

        import tensorflow as tf

        import gpudist_core as gd
        from tests.core.strategies.sums import total

        strategy = gd.make_strategy(timeout_seconds=1, time_each_collective=True)
        if strategy.cluster_resolver.task_id == 1:
            time.sleep(4)
            return "stayed away"
        try:
            return total(strategy)
        except tf.errors.OpError as error:
            return type(error).__name__

    assert on_hosts("2x1", lazy) == ["DeadlineExceededError", "stayed away"]


@pytest.mark.parametrize("how", ["step", pytest.param("fit", marks=pytest.mark.slow)])
def test_a_step_that_waits_for_a_host_is_an_error_that_names_it(on_hosts: OnHosts, how: str) -> None:
    def lazy() -> Any:
        import time

        import keras
        import numpy as np
        import tensorflow as tf

        import gpudist_core as gd
        from gpudist_core.pipelines.cross_host_check import HostFailed
        from gpudist_core.strategies import waiting

        strategy = gd.make_strategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
            distributed = gd.distributed(model)
            distributed.compile(optimizer, "mse")
        x = np.ones((8, 2), "float32")
        data = gd.Pipeline.from_arrays((x, x[:, :1]), global_batch_size=4)
        step = gd.TrainStep(model, optimizer, lambda y, z: keras.losses.mean_squared_error(y, z))

        def train() -> None:
            if how == "fit":
                distributed.fit(data, verbose=0)
                return
            for batch in data.distribute(strategy):
                float(step(batch))

        train()
        waiting._ASKED_SECONDS = 1.0
        waiting.set_limit(strategy, 3)  # what a step takes once its functions are made
        if strategy.cluster_resolver.task_id == 1:
            time.sleep(8)
            return "stayed away"
        try:
            train()
        except (tf.errors.DeadlineExceededError, HostFailed) as error:
            return str(error)
        return "went on"

    told, away = on_hosts("2x1", lazy)
    assert away == "stayed away"
    expected = {
        "fit": "All hosts must make the same steps, each within the time limit. Received: timeout_seconds=3, host=0, host 1 is not in",
        "step": "no answer from host 1 for ",  # it does not even begin to iterate
    }
    assert expected[how] in told


def test_steps_of_several_hosts_leave_no_threads(on_hosts: OnHosts) -> None:
    def many() -> int:
        import os

        import gpudist_core as gd
        from tests.core.strategies.sums import trained

        more = trained(gd.make_strategy())
        more()
        before = len(os.listdir("/proc/self/task"))
        for _ in range(20):
            more()
        return len(os.listdir("/proc/self/task")) - before

    assert max(on_hosts("2x1", many)) < 20


def test_a_runtime_that_is_up_already_is_named(on_hosts: OnHosts) -> None:
    def late() -> Any:
        import tensorflow as tf

        import gpudist_core as gd
        from tests.core.strategies.sums import error_of

        tf.constant(1.0)
        return error_of(gd.make_strategy)

    expected = "A strategy of several hosts must be made before TensorFlow's runtime starts. Received: kind='multi-worker'. Call make_strategy() before the first tensor, variable, model or list of logical devices."
    assert on_hosts("2x1", late) == [("UsageError", expected)] * 2


def test_one_worker_alone_trains_on_its_own_devices(on_hosts: OnHosts) -> None:
    def alone() -> Any:
        import gpudist_core as gd
        from tests.core.strategies.sums import total

        config = {"cluster": {"worker": ["localhost:10000"]}, "task": {"type": "worker", "index": 0}}
        strategies = [gd.make_strategy(kind, cluster=config) for kind in ("multi-worker", "auto")]
        return [(type(strategy).__name__, total(strategy)) for strategy in strategies]

    assert on_hosts("1x2", alone) == [[("CollectiveAllReduceStrategy", [3.0] * 2), ("MirroredStrategy", [3.0] * 2)]]


def test_parameter_servers_are_there_when_the_chief_has_its_strategy(on_hosts: OnHosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        import gpudist_core as gd

        here = str(gd.environment())
        strategy = gd.make_strategy()
        with strategy.scope():
            count = tf.Variable(1.0)
        return here, type(strategy).__name__, count.device, float(count)

    chief, *others = on_hosts("2x1+1ps", program)
    here, name, device, value = chief
    assert here == "parameter-server: chief, host 0 of 2, 1 device (GPU:0), says TF_CONFIG"
    assert (name, value) == ("ParameterServerStrategyV2", 1.0)
    assert device.startswith("/job:ps/replica:0/task:0")
    assert others == [None] * 3


_PROGRAM = """
import gpudist_core as gd
print(gd.environment())
from tests.core.strategies.sums import total
print(total(gd.make_strategy(timeout_seconds=100)))
"""


def _told_by_tf_config(index: int, ports: list[int]) -> dict[str, str]:
    addresses = [f"localhost:{port}" for port in ports]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})}


def _told_by_slurm(index: int, ports: list[int]) -> dict[str, str]:
    rank, job = str(index), str(ports[0])  # the ports of a step follow from the number of its job
    step = {"PROCID": rank, "LOCALID": rank, "NTASKS": "2", "STEP_NUM_TASKS": "2", "JOB_ID": job}
    nodes = {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "2"}
    return {f"SLURM_{name}": value for name, value in {**step, **nodes}.items()} | {"SLURMD_NODENAME": "localhost"}


@pytest.mark.parametrize(
    ("told", "says"), [pytest.param(_told_by_tf_config, "TF_CONFIG", marks=pytest.mark.slow), (_told_by_slurm, "Slurm")]
)
def test_plain_processes_find_each_other_without_the_emulator(told: Callable[..., dict[str, str]], says: str) -> None:
    ports = free_ports(2)
    processes = []
    for index in range(2):
        environment = {**os.environ, **told(index, ports), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _PROGRAM]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for index, process in enumerate(processes):
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
            assert out == f"multi-worker: worker, host {index} of 2, 1 device (CPU:0), says {says}\n[3.0]\n"
    finally:
        for process in processes:
            process.kill()


def test_a_second_strategy_of_several_hosts_leaves_the_first_as_it_is_and_needs_no_meeting(on_hosts: OnHosts) -> None:
    def two() -> list[float]:
        import time

        import tensorflow as tf

        import gpudist_core as gd
        from tests.core.strategies.sums import total

        first = gd.make_strategy()
        before = total(first)
        if first.cluster_resolver.task_id == 0:
            time.sleep(1)  # the leader comes last
        second = gd.make_strategy()
        with second.scope():
            variable = tf.Variable(3.0)
        return [*before, float(variable.numpy()), *total(second), *total(first), *total(second)]

    for seen in on_hosts("2x2", two):
        assert seen == [10.0, 10.0, 3.0, *[10.0] * 6]  # two devices a host


def test_sigterm_does_what_it_did_before_the_strategy_was_made(on_hosts: OnHosts) -> None:
    def made() -> bool:
        import gpudist_core as gd
        from tests.core.strategies.sums import hears_sigterm

        return hears_sigterm(gd.make_strategy)

    assert on_hosts("2x1", made) == [True, True]


def test_a_process_stays_in_its_cluster(on_hosts: OnHosts) -> None:
    def two() -> Any:
        import gpudist_core as gd
        from tests.core.strategies.sums import error_of

        first = gd.make_strategy()
        task = {"type": "worker", "index": first.cluster_resolver.task_id}
        other = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": task}
        return error_of(gd.make_strategy, cluster=other)

    for kind, text in on_hosts("2x1", two):
        assert kind == "UsageError"
        assert text == (
            "A process can belong to one cluster only. Received: cluster={'worker': ['127.0.0.1:1', '127.0.0.1:2']}. Start another process for the other cluster."
        )
