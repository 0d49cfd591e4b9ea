"""A seed that all hosts agree on."""

from __future__ import annotations

import secrets
from typing import Any

from gpudist_core.pipelines.hashing import words
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import trainer


def common_seed(strategy: Any, number: int) -> int:
    """A seed for one of several uses.

    Args:
        strategy: The strategy, all hosts of which must ask.
        number: Of the use.

    Returns:
        A function of what `keras.utils.set_random_seed` was told on the first host, and of the number; without it, of what the
        first host draws.
    """
    told = trainer.seed()
    seed = _of_first_host(strategy, secrets.randbits(32) if told is None else int(told))
    return derived(seed, number)


def derived(seed: int, number: int) -> int:
    """Of a seed one for each use.

    Args:
        seed: The seed.
        number: Of the use.

    Returns:
        A whole number below 2**31.
    """
    return int(words(seed, number)[0] >> 33)


def _of_first_host(strategy: Any, value: int) -> int:
    import tensorflow as tf

    from gpudist_core.gradients.reduction import all_reduce

    if replicas_of(strategy).num_hosts == 1:
        return value

    def of_first() -> Any:
        context = tf.distribute.get_replica_context()
        # A float32 holds 16 bits exactly.
        halves = [float(value >> 16 & 0xFFFF), float(value & 0xFFFF)]
        return all_reduce(tf.where(tf.equal(context.replica_id_in_sync_group, 0), tf.constant(halves), tf.zeros(2)))

    results = strategy.experimental_local_results(tf.function(lambda: strategy.run(of_first), autograph=False)())
    high, low = (int(half) for half in results[0])
    return high << 16 | low
