"""Choose a seed that is equal on all hosts."""

from __future__ import annotations

import secrets
from typing import Any

from gpudist_core.pipelines.cross_host_check import of_first_host
from gpudist_core.pipelines.hashing import words
from gpudist_core.upstream import trainer


def common_seed(strategy: Any, number: int) -> int:
    """Return a seed for one of several uses.

    Args:
        strategy: The strategy. All its hosts must ask.
        number: The number of the use.

    Returns:
        A function of the seed from `keras.utils.set_random_seed` on the first host, and of the number. Without such a seed, the
        first host draws one.
    """
    user_seed = trainer.seed()
    seed = of_first_host(strategy, secrets.randbits(32) if user_seed is None else int(user_seed))
    return derived(seed, number)


def derived(seed: int, number: int) -> int:
    """Derive a seed for each use from one seed.

    Args:
        seed: The seed.
        number: The number of the use.

    Returns:
        An integer below 2**31.
    """
    return int(words(seed, number)[0] >> 33)
