"""What is relied upon of TensorFlow's private parts, which fails when upstream changes it; and a pool's options."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from emulate.cluster import HostContext, HostResult, Pool, before_runtime
from emulate.errors import UsageError


def returned(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def renew(context: HostContext) -> list[Any]:
    import tensorflow as tf

    from emulate.cluster import upstream

    cls = sys.modules["tensorflow.python.distribute.collective_all_reduce_strategy"].CollectiveAllReduceStrategy
    tf.distribute.MultiWorkerMirroredStrategy()
    before = cls._collective_key_base == upstream.first_key()
    upstream.renew_collectives(3_000_000)
    assert upstream._are_new
    tf.distribute.MultiWorkerMirroredStrategy()
    return [before, upstream.first_key(), upstream._are_new]


def test_collectives_are_renewed_for_the_next_strategy_of_all_hosts(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        assert returned(lease.run(renew)) == [[True, 3_010_000, False]] * 2


def act_first(context: HostContext) -> list[str]:
    import tensorflow as tf

    said: list[str] = []
    with before_runtime(lambda: said.append("acted")):
        said.append("nothing runs")
        tf.ones([])
        tf.ones([])
    return said


def test_an_action_comes_before_the_first_operation_once(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        assert returned(lease.run(act_first)) == [["nothing runs", "acted"]]
        assert returned(lease.run(act_first)) == [["nothing runs"]]


def forget(context: HostContext) -> bool:
    import tensorflow as tf

    from emulate.cluster import upstream

    before = tf.random.get_global_generator()
    upstream.forget_generator()
    return tf.random.get_global_generator() is before


def test_the_global_generator_is_forgotten(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        assert returned(lease.run(forget)) == [False]


def clear_legacy(context: HostContext) -> list[Any]:
    import tf_keras

    from emulate.cluster import upstream

    tf_keras.utils.set_random_seed(3)
    first = tf_keras.layers.Dense(1).name
    upstream.clear_legacy_session()
    return [first == tf_keras.layers.Dense(1).name, hasattr(tf_keras.src.backend._SEED_GENERATOR, "generator")]


def test_the_session_of_tf_keras_is_cleared(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        assert returned(lease.run(clear_legacy)) == [[True, False]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"network": "mine"}, r"network must be one of own, host\. Received: network='mine'"),
        ({"all_reduce": "nccl"}, r"all_reduce must be one of .*\. Received: all_reduce='nccl'"),
        ({"max_hosts": 0}, r"A pool keeps at least one host\. Received: max_hosts=0"),
        ({"max_hosts": "a"}, r"A pool keeps at least one host\. Received: max_hosts='a'"),
        (
            {"environment": {"A": 1}},
            r"must have a text for each name\. Received: environment={'A': 1}\. Write it as {'A': '1'}",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(preload: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Pool(preload=preload, **options)
