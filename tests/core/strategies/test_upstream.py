"""What gpudist_core works round in TensorFlow's strategies is still so; when a test fails, upstream changed: look again."""

from __future__ import annotations

from typing import Any

from tests.core.conftest import OnHosts
from tests.core.strategies.conftest import Plain


def test_hierarchical_copy_loses_one_of_three_devices(plain: Plain) -> None:
    """When this fails, `on_one_host` need not refuse odd numbers of devices any more."""

    def three() -> list[float]:
        import tensorflow as tf

        from tests.core.strategies.sums import split_cpu, total

        split_cpu(3)
        return total(tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()))

    assert plain(three) == [3.0] * 3  # 1 + 2, without the third


def test_strategies_of_different_sizes_share_their_collective_keys(plain: Plain) -> None:
    """When this fails, `new_collective_keys` is no longer needed."""

    def two() -> Any:
        import tensorflow as tf

        from tests.core.strategies.sums import split_cpu, total

        split_cpu(3)
        first = total(tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1", "/CPU:2"]))
        try:
            return first, total(tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"]))
        except tf.errors.OpError as error:
            return first, type(error).__name__

    first, second = plain(two)
    assert first == [6.0] * 3
    assert second == "InternalError"


def test_the_runtime_and_its_server_are_seen_to_be_up(plain: Plain) -> None:
    def seen() -> list[bool]:
        import tensorflow as tf

        import gpudist_core as gd
        from gpudist_core.upstream import runtime as upstream

        before = [upstream.is_initialized(), upstream.has_collective_server()]
        gd.environment()
        untouched = upstream.is_initialized()
        tf.constant(1.0)
        return [*before, untouched, upstream.is_initialized(), upstream.has_collective_server()]

    assert plain(seen) == [False, False, False, True, False]


def test_keys_are_read_when_a_strategy_is_made_and_a_ring_takes_its_own(plain: Plain) -> None:
    def keys() -> list[Any]:
        import tensorflow as tf

        from gpudist_core.upstream import runtime as upstream
        from tests.core.strategies.sums import split_cpu

        split_cpu(2)
        first_key = upstream.new_collective_keys()
        devices = ["/CPU:0", "/CPU:1"]
        ring = upstream.ring(devices, tf.distribute.experimental.CommunicationOptions(), first_key)
        strategy = tf.distribute.MirroredStrategy(devices)
        return [first_key, ring._collective_keys.get_group_key(devices), strategy.extended._collective_key_base]

    first_key, group_key, base = plain(keys)
    assert first_key > base > 0
    assert group_key >= first_key


def test_slurms_resolver_sorts_nodes_by_name_and_fails_without_gpus(plain: Plain) -> None:
    """When this fails, TensorFlow's own `cluster_spec` may serve."""

    def resolved() -> Any:
        import os

        import tensorflow as tf

        step = {"PROCID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "n[2,10]", "STEP_TASKS_PER_NODE": "1(x2)"}
        os.environ |= {f"SLURM_{name}": value for name, value in step.items()}
        make = tf.distribute.cluster_resolver.SlurmClusterResolver
        spec = make(gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False).cluster_spec().as_dict()
        try:
            return spec, str(make(gpus_per_node=0, auto_set_gpu=False).cluster_spec().as_dict())
        except ValueError as error:
            return spec, str(error)

    assert plain(resolved) == ({"worker": ["n10:8888", "n2:8888"]}, "range() arg 3 must not be zero")


def test_a_second_strategy_starts_collectives_anew_so_that_hosts_may_miss_each_other(on_hosts: OnHosts) -> None:
    """When this fails, `beside_other_strategies` need not keep TensorFlow from starting them anew."""

    def two() -> bool:
        import threading
        import time

        import tensorflow as tf

        make = tf.distribute.MultiWorkerMirroredStrategy
        if make().cluster_resolver.task_id == 0:
            time.sleep(1)  # the leader comes last
        second = make()

        def variable() -> None:
            with second.scope():
                tf.Variable(1.0)

        waiting = threading.Thread(target=variable, daemon=True)
        waiting.start()
        waiting.join(5)
        return waiting.is_alive()

    assert on_hosts("2x1", two) == [True, True]


def test_a_server_for_collectives_takes_sigterm_from_the_program(on_hosts: OnHosts) -> None:
    """When this fails, `keeping_sigterm` is no longer needed."""

    def made() -> bool:
        import tensorflow as tf

        from tests.core.strategies.sums import hears_sigterm

        return hears_sigterm(tf.distribute.MultiWorkerMirroredStrategy)

    assert on_hosts("2x1", made) == [False, False]


def test_a_collective_with_a_time_limit_leaves_a_thread_for_as_long(on_hosts: OnHosts) -> None:
    """When this fails, `make_strategy` can time each collective, and `waiting` is no longer needed."""

    def many() -> int:
        import os

        import gpudist_core as gd
        from tests.core.strategies.sums import trained

        more = trained(gd.make_strategy(timeout_seconds=60, time_each_collective=True))
        more()
        before = len(os.listdir("/proc/self/task"))
        for _ in range(5):
            more()
        return len(os.listdir("/proc/self/task")) - before

    assert min(on_hosts("2x1", many)) >= 25  # 25 steps
