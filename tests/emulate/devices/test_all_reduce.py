"""How replicas are summed: what was asked for is used, every program runs, and the ring gives the same bits everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.devices import DevicePlan, GpuShare
from emulate.devices.all_reduce import AllReduceChoice
from emulate.devices.install import _network
from tests.emulate.devices.hosts import Hosts


def train(strategy_name: str, *, build: bool = True, steps_per_call: int = 1) -> Any:
    """Train eight steps in a compiled loop; the weights as bytes, and how they were summed."""
    import keras
    import numpy as np
    import tensorflow as tf

    from emulate.devices import all_reduce_in_use

    strategy = getattr(tf.distribute, strategy_name)()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        optimizer = keras.optimizers.Adam(0.01)
        if build:
            optimizer.build(model.trainable_variables)

    def step(x, y):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / 48
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def several(iterator):  # type: ignore[no-untyped-def]  # AutoGraph cannot read annotations of a pickled function
        total = tf.constant(0.0)
        for _ in tf.range(steps_per_call):
            total += strategy.reduce("SUM", strategy.run(step, args=next(iterator)), axis=None)
        return total

    x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(96) % 3)).batch(48).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(data))
    total = sum(float(several(iterator)) for _ in range(8 // steps_per_call))
    return b"".join(w.numpy().tobytes() for w in model.trainable_variables), total, all_reduce_in_use()


@pytest.mark.slow
def test_the_ring_gives_the_same_bits_on_every_topology(run: Hosts) -> None:
    results = [
        run(train, "MirroredStrategy", devices=4, all_reduce="ring"),
        run(train, "MultiWorkerMirroredStrategy", devices=4, all_reduce="ring"),
        *run(train, "MultiWorkerMirroredStrategy", devices=2, hosts=2, all_reduce="ring"),
        *run(train, "MultiWorkerMirroredStrategy", devices=1, hosts=4, all_reduce="ring"),
    ]
    assert len({weights for weights, _, _ in results}) == 1
    assert [loss for _, loss, _ in results] == pytest.approx([results[0][1]] * len(results), rel=1e-6)
    assert {name for _, _, name in results} == {"ring"}


@pytest.mark.parametrize(
    ("all_reduce", "build"),
    [
        ("auto", True),
        pytest.param("ring", False, marks=pytest.mark.slow),
        pytest.param("auto", False, marks=pytest.mark.slow),
        pytest.param("ring", True, marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_and_a_loop_inside_a_traced_function_work(run: Hosts, all_reduce: str, build: bool) -> None:
    def program(strategy_name: str) -> Any:
        return train(strategy_name, build=build, steps_per_call=4)

    names = ("MirroredStrategy", "MultiWorkerMirroredStrategy")
    one_host = [run(program, name, devices=2, all_reduce=all_reduce)[1] for name in names]
    two_hosts = run(program, "MultiWorkerMirroredStrategy", devices=2, hosts=2, all_reduce=all_reduce)
    assert one_host == pytest.approx([two_hosts[0][1]] * 2, rel=1e-5)


IN_A_BRANCH, INT32, BFLOAT16 = "inside of a condition or a loop", "datatype DT_INT32", "datatype DT_BFLOAT16"


@pytest.mark.parametrize(
    ("build", "steps_per_call", "told"),
    [
        (True, 1, []),
        pytest.param(True, 4, [], marks=pytest.mark.slow),  # test_an_optimizer_and_a_loop_inside_a_traced_function_work
        pytest.param(False, 1, [IN_A_BRANCH], marks=pytest.mark.slow),
        (False, 4, [IN_A_BRANCH]),
    ],
)
@pytest.mark.parametrize(("name", "hosts"), [("MirroredStrategy", 0), ("MultiWorkerMirroredStrategy", 2)])
def test_a_sum_that_collectives_would_lose_in_a_branch_is_told(
    run: Hosts, name: str, hosts: int, build: bool, steps_per_call: int, told: list[str]
) -> None:
    def program() -> Any:
        return train(name, build=build, steps_per_call=steps_per_call)

    run(program, devices=2, hosts=hosts)
    notes = {text for _, text in run.notes}
    assert [part for part in (IN_A_BRANCH, INT32, BFLOAT16) for text in notes if part in text] == told


@pytest.mark.parametrize(
    ("name", "hosts", "told"),
    [("MirroredStrategy", 0, {BFLOAT16}), ("MultiWorkerMirroredStrategy", 2, {INT32, BFLOAT16})],
)
def test_sums_of_dtypes_that_collectives_refuse_on_gpus_are_told(run: Hosts, name: str, hosts: int, told: set[str]) -> None:
    def program() -> list[float]:
        import tensorflow as tf

        strategy = getattr(tf.distribute, name)()

        def total(dtype: str) -> float:
            def step() -> Any:
                return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([], dtype))

            return float(strategy.experimental_local_results(tf.function(lambda: strategy.run(step))())[0])

        return [total(dtype) for dtype in ("float32", "int64", "int32", "bfloat16")]

    totals = run(program, devices=2, hosts=hosts)
    assert totals == ([[4.0] * 4] * 2 if hosts == 2 else [2.0] * 4)
    assert {part for part in (INT32, BFLOAT16) for _, text in run.notes if part in text} == told


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_ring_sums_floats_of_any_kind(run: Hosts, dtype: str) -> None:
    def program() -> list[float]:
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        total = tf.function(
            lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([3], dtype)))
        )()
        return [float(one[0]) for one in strategy.experimental_local_results(total)]

    assert run(program, devices=4, all_reduce="ring") == [4.0] * 4


@pytest.mark.parametrize(
    ("all_reduce", "used"),
    [("auto", "one-device"), ("ring", "ring"), ("hierarchical", "hierarchical"), ("one-device", "one-device")],
)
def test_what_was_asked_for_is_used(run: Hosts, all_reduce: str, used: str) -> None:
    def program() -> list[str]:
        import tensorflow as tf

        from emulate.devices import all_reduce_in_use

        found = [all_reduce_in_use()]
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
            strategy = getattr(tf.distribute, name)()
            found.append(all_reduce_in_use())
            total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
            assert [float(t) for t in strategy.experimental_local_results(total)] == [4.0] * 4
        return found

    assert run(program, devices=4, all_reduce=all_reduce) == ["none", used, used]


def test_a_hierarchical_sum_over_an_odd_number_of_devices_loses_none(run: Hosts) -> None:
    def program() -> list[float]:
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
        return [float(t) for t in strategy.experimental_local_results(total)]

    assert run(program, devices=3, all_reduce="hierarchical") == [3.0] * 3
    text = "HierarchicalCopyAllReduce loses one of 3 devices: ReductionToOneDevice is used instead"
    assert run.notes == [("all-reduce", text)]


def test_several_hosts_ring_and_say_so_when_something_else_was_asked_for(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        from emulate.devices import all_reduce_in_use

        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
        )
        tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        return all_reduce_in_use(), options.implementation.name

    assert run(program, devices=1, hosts=2, all_reduce="hierarchical") == [("ring", "RING")] * 2
    assert ("all-reduce", "several hosts are summed by a ring: --all-reduce hierarchical holds on one host only") in run.notes
    assert ("all-reduce", "NCCL runs on GPUs only: the ring is used here") in run.notes


@pytest.mark.parametrize(
    ("implementation", "hosts", "wish", "used", "noted"),
    [
        ("AUTO", 1, "auto", "ring", []),
        ("NCCL", 1, "auto", "nccl", []),
        ("AUTO", 2, "auto", "ring", []),
        ("NCCL", 2, "auto", "nccl", []),
        ("NCCL", 1, "one-device", "one-device", []),
        ("NCCL", 2, "one-device", "nccl", ["several hosts are summed by NCCL: --all-reduce one-device holds on one host only"]),
        ("NCCL", 1, "ring", "ring", ["NCCL gives way to --all-reduce ring: the ring is used here"]),
    ],
)
def test_on_whole_gpus_a_collective_is_called_what_it_is(
    run: Hosts, implementation: str, hosts: int, wish: str, used: str, noted: list[str]
) -> None:
    def program() -> Any:
        from types import SimpleNamespace

        import tensorflow as tf

        from emulate.devices import DevicePlan, GpuShare, all_reduce_in_use, upstream
        from emulate.devices.all_reduce import AllReduceChoice

        class CollectiveAllReduce:
            pass

        options = upstream.communication_options()
        options.__init__ = options.__init__.__wrapped__  # as on a host with GPUs, this one has none
        notes: list[str] = []
        plan = DevicePlan(2, hosts, wish, gpus=GpuShare(("GPU-a", "GPU-b")))
        choice = AllReduceChoice(plan, lambda code, text: notes.append(text))
        choice.without_nccl() if choice.replaces else None
        extended = SimpleNamespace(
            _num_workers=hosts,
            worker_devices=("GPU:0", "GPU:1"),
            _cross_device_ops=CollectiveAllReduce(),
            _communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
            ),
        )
        choice.for_multi_worker(extended)
        return all_reduce_in_use(), notes

    assert run(program, devices=2) == (used, noted)


@pytest.mark.parametrize("share", [GpuShare(("GPU-a",), ((500, 500),)), GpuShare(("MIG-a",), are_parts=True)])
def test_devices_that_may_share_a_gpu_are_summed_without_nccl(share: GpuShare) -> None:
    choice = AllReduceChoice(DevicePlan(len(share.owners), 2, gpus=share), lambda code, text: None)
    assert choice.replaces
    assert choice._why_not == "refuses two ranks on one GPU"
    assert not AllReduceChoice(DevicePlan(1, 2, gpus=GpuShare(("GPU-a",))), lambda code, text: None).replaces


def test_a_program_may_ask_for_any_sum(run: Hosts) -> None:
    def program() -> list[float]:
        import tensorflow as tf

        results = []
        for operation in (
            tf.distribute.NcclAllReduce(num_packs=2),
            tf.distribute.HierarchicalCopyAllReduce(num_packs=2),
            tf.distribute.ReductionToOneDevice(),
            None,
        ):
            strategy = tf.distribute.MirroredStrategy(cross_device_ops=operation)
            ones = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
            results.append(float(strategy.experimental_local_results(ones)[0]))
        return results

    assert run(program, devices=4) == [4.0] * 4
    assert run.notes == [("all-reduce", "NcclAllReduce runs on GPUs only: ReductionToOneDevice is used here")]


def test_a_sum_is_traced_without_a_walk_through_the_graphs_of_all_replicas(run: Hosts) -> None:
    def program() -> int:
        import tensorflow as tf

        from tests.core.strategies.sums import walked_behind

        return walked_behind(
            lambda value: tf.distribute.get_replica_context().all_reduce("SUM", value), tf.distribute.MirroredStrategy()
        )

    assert run(program, devices=3) < 100  # of more than 300


def test_strategies_of_different_sizes_live_in_one_process(run: Hosts) -> None:
    def program() -> list[float]:
        import tensorflow as tf

        totals = []
        for devices in (["/gpu:0", "/gpu:1"], ["/gpu:0", "/gpu:1", "/gpu:2"], None, ["/gpu:1", "/gpu:0"]):
            strategy = tf.distribute.MirroredStrategy(devices)

            @tf.function
            def total(strategy: Any = strategy) -> Any:
                return strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)

            totals.append(float(total()))
        return totals

    assert run(program, all_reduce="ring") == [2.0, 3.0, 4.0, 2.0]


@given(st.integers(1, 9))
def test_the_sorting_network_sorts(number: int) -> None:
    # A network of comparisons sorts everything if it sorts every sequence of zeros and ones.
    for bits in itertools.product((0, 1), repeat=number):
        values = list(bits)
        for low, high in _network(number):
            values[low], values[high] = min(values[low], values[high]), max(values[low], values[high])
        assert values == sorted(bits)
