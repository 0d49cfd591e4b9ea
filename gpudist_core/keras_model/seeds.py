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
        A function of `keras.utils.set_random_seed` and the number; without it, what the first host draws.
    """
    seed = trainer.seed()
    if seed is None:
        seed = _of_first_host(strategy, secrets.randbits(30))
    return int(words(int(seed), number)[0] >> 33)


def _of_first_host(strategy: Any, value: int) -> int:
    import tensorflow as tf

    from gpudist_core.gradients.reduction import all_reduce

    if replicas_of(strategy).num_hosts == 1:
        return value

    def of_first() -> Any:
        context = tf.distribute.get_replica_context()
        return all_reduce(tf.where(tf.equal(context.replica_id_in_sync_group, 0), float(value % 2**24), 0.0))

    return int(strategy.experimental_local_results(tf.function(lambda: strategy.run(of_first), autograph=False)())[0])
