"""A seed that all hosts agree on."""

from __future__ import annotations

import secrets
from typing import Any

from gpudist_core.pipelines.alike import of_first_host
from gpudist_core.pipelines.hashing import words
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
    seed = of_first_host(strategy, secrets.randbits(32) if told is None else int(told))
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
