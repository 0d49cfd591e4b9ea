"""On a machine with GPUs they compute what they are said to compute, and the parent that forks hosts touches no CUDA.

They run with `--gpudist-device gpu` (ci/gpu.sh), and then fail where there is no GPU; without it they are skipped, and counted
as skipped with the reason. A machine with one GPU suffices: it is sliced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from emulate import Cluster, verify
from emulate.cluster import Preload
from emulate.devices import find_gpus, share_out
from emulate.topology import Topology

ROOT = Path(__file__).parents[3]
LIMIT = 3600  # the first ones of a machine may wait until the driver has compiled TensorFlow's kernels


@pytest.fixture(scope="module", autouse=True)
def _on_gpus(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("gpudist_device") != "gpu":
        pytest.skip("it needs a GPU, and --gpudist-device gpu")


@pytest.fixture(scope="module")
def preload() -> Iterator[Preload]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Preload(environment={"TF_CPP_MIN_LOG_LEVEL": "3"}) as parent:
        yield parent


def add_up(make: Any) -> dict[str, Any]:
    """On a host: the replicas' devices, what they add up to, and how."""
    import tensorflow as tf

    from emulate.devices import all_reduce_in_use

    strategy = make(tf)
    context = tf.distribute.get_replica_context

    @tf.function
    def step() -> Any:
        return strategy.run(
            lambda: context().all_reduce("sum", tf.ones([1000]) * tf.cast(context().replica_id_in_sync_group + 1, "float32"))
        )

    total = strategy.experimental_local_results(step())
    return {
        "devices": [value.device for value in total],
        "total": float(total[0][0]),
        "all_reduce": all_reduce_in_use(),
        "gpus": len(tf.config.list_logical_devices("GPU")),
    }


def mirrored(tf: Any) -> Any:
    return tf.distribute.MirroredStrategy()


def multi_worker(tf: Any) -> Any:
    return tf.distribute.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("topology", ["1x1", "1x2", "1x4"])
def test_the_replicas_of_one_host_add_up_on_gpus(topology: str, preload: Preload) -> None:
    with Cluster(topology, device="gpu", preload=preload, timeout=LIMIT) as cluster:
        [found] = cluster.run(add_up, mirrored)
    number = Topology.parse(topology).num_devices
    assert found["devices"] == [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(number)]
    assert found["total"] == number * (number + 1) / 2
    is_sliced = share_out(find_gpus(), Topology.parse(topology)).is_sliced
    assert found["all_reduce"] == ("none" if number == 1 else "one-device" if is_sliced else "nccl")
    assert ("NCCL, which refuses two ranks on one GPU, is not what ran" in " ".join(cluster.notes)) == is_sliced


@pytest.mark.parametrize("topology", ["2x1", "2x2"])
def test_several_hosts_add_up_on_gpus(topology: str, preload: Preload) -> None:
    shape = Topology.parse(topology)
    with Cluster(topology, device="gpu", preload=preload, timeout=LIMIT) as cluster:
        found = cluster.run(add_up, multi_worker)
    assert {one["total"] for one in found} == {shape.num_replicas * (shape.num_replicas + 1) / 2}
    assert all(one["gpus"] == shape.num_devices for one in found)
    assert all("GPU" in device for one in found for device in one["devices"])


def test_the_parent_that_forks_hosts_has_no_gpu_open(preload: Preload) -> None:
    with Cluster("1x2", device="gpu", preload=preload, timeout=LIMIT) as cluster:
        [parent] = cluster.run(grandparent)
    opened = [os.readlink(f"/proc/{parent}/fd/{fd}") for fd in os.listdir(f"/proc/{parent}/fd")]
    assert not [path for path in opened if path.startswith("/dev/nvidia")]


def grandparent() -> int:
    """The process that forked this host's keeper."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[1])


def test_emulation_on_the_cpu_takes_no_gpu_memory(preload: Preload) -> None:
    def look() -> Any:
        import tensorflow as tf

        from emulate.devices import upstream

        strategy = tf.distribute.MirroredStrategy()
        strategy.run(lambda: tf.ones([10]))
        return strategy.num_replicas_in_sync, upstream.context().list_logical_devices("GPU")

    with Cluster("1x2", device="cpu", preload=preload, timeout=LIMIT) as cluster:
        assert cluster.run(look) == [(2, [])]


def test_a_correct_program_is_equivalent_on_gpus_and_the_verdict_says_gpu(preload: Preload) -> None:
    program = ROOT / "fixtures" / "programs" / "multiworker_loop.py"
    verdict = verify(program, ["1x2", "2x1"], device="gpu", steps=3, timeout=LIMIT, preload=preload)
    assert verdict.device == "gpu"
    assert [run.verdict for run in verdict.runs] == ["equivalent", "equivalent"]


def test_a_wrong_program_is_divergent_on_gpus(preload: Preload) -> None:
    program = ROOT / "fixtures" / "bugs" / "loss_scaling_multiworker.py"
    verdict = verify(program, "1x2", device="gpu", steps=3, timeout=LIMIT, preload=preload)
    assert [cause.code for cause in verdict.runs[0].causes] == ["loss-scaling"]
