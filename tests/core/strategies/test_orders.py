"""A variable is read before it is updated, whatever TensorFlow makes of a compiled step."""

from __future__ import annotations

import pytest

from tests.core.strategies.conftest import Plain


def test_sums_of_tensorflows_own_lose_the_order_of_reads_and_updates(plain: Plain) -> None:
    """When this fails, `all_reduce` of gpudist_core.upstream.runtime need not sum by itself any more."""

    def lost() -> int:
        import tensorflow as tf

        from tests.core.strategies.orders import lost_orders

        return lost_orders(lambda gradients: tf.distribute.get_replica_context().all_reduce("SUM", gradients))

    assert plain(lost) > 0


@pytest.mark.parametrize("differentiable", [False, True])
def test_sums_of_ours_keep_the_order_of_reads_and_updates(plain: Plain, differentiable: bool) -> None:
    def lost() -> int:
        from gpudist_core.gradients import sum_over_replicas
        from tests.core.strategies.orders import lost_orders

        return lost_orders(lambda gradients: sum_over_replicas(gradients, [None] * 2, differentiable=differentiable))

    assert plain(lost) == 0


def test_the_gradient_of_a_sum_is_the_sum_of_the_replicas_gradients_of_it(plain: Plain) -> None:
    def gradients() -> list[float]:
        import tensorflow as tf

        from gpudist_core.gradients import sum_over_replicas
        from tests.core.strategies.sums import split_cpu

        split_cpu(2)
        strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice())

        @tf.function(autograph=False)
        def train(x: tf.Tensor) -> tf.Tensor:
            def step() -> tf.Tensor:
                mine = x * (1.0 + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
                with tf.GradientTape() as tape:
                    tape.watch(mine)
                    one, two = sum_over_replicas([mine, 2 * mine], [None] * 2, differentiable=True)
                    loss = one * one + two  # one is 3 x, two is 6 x
                return tape.gradient(loss, mine)

            return strategy.experimental_local_results(strategy.run(step))

        return [float(one) for one in train(tf.constant(1.0))]

    assert plain(gradients) == [2 * (2 * 3.0 + 2.0)] * 2


def test_a_sum_is_traced_without_a_walk_through_the_graphs_of_all_replicas(plain: Plain) -> None:
    """When the first number is small, `_with_gradient` of gpudist_core.upstream.runtime need not end the walk."""

    def walked() -> list[int]:
        import tensorflow as tf

        from gpudist_core.gradients import sum_over_replicas
        from tests.core.strategies.sums import split_cpu, walked_behind

        split_cpu(3)
        strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice())
        return [
            walked_behind(lambda value: tf.distribute.get_replica_context().all_reduce("SUM", value), strategy),
            walked_behind(lambda value: sum_over_replicas([value], [None], differentiable=True), strategy),
        ]

    of_tensorflow, of_ours = plain(walked)
    assert of_tensorflow > 3 * 200
    assert of_ours < 100
