"""Initialize a sharded table with the same values on every topology: each row depends on its number only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist_core.errors import UsageError

Initializer = Callable[[int, tuple[int, ...]], Any]
"""A function (start, (count, *rest)) -> values of `count` rows from `start` on."""

_PAGE = 1024
"""Rows that share a generator: enough to be fast, few enough to draw little more than a slice needs."""


def uniform(low: float = -0.05, high: float = 0.05, seed: int = 0) -> Callable[[int, tuple[int, ...]], NDArray[Any]]:
    """Return an initializer of uniform random rows for `shard`. The defaults are Keras's defaults for embeddings.

    Args:
        low: The smallest value.
        high: The exclusive upper bound.
        seed: The seed. Each seed gives other values.

    Returns:
        A function of (start, (count, *rest)) that returns float32 values of shape (count, *rest).

    Example:
        >>> rows = uniform(seed=1)
        >>> bool((rows(0, (5, 2))[3:] == rows(3, (2, 2))).all())
        True
    """

    def rows(start: int, shape: tuple[int, ...]) -> NDArray[Any]:
        count, *rest = shape
        first, last = start // _PAGE, -(-(start + count) // _PAGE)
        drawn = np.empty(((last - first) * _PAGE, *rest), np.float32)
        for page in range(first, last):
            at = (page - first) * _PAGE
            np.random.Generator(np.random.Philox(key=[seed, page])).random(out=drawn[at : at + _PAGE], dtype=np.float32)
        drawn *= high - low
        drawn += low
        offset = start - first * _PAGE
        return drawn[offset : offset + count]

    return rows


def check_initializer(initializer: Any) -> None:
    """Refuse an initializer that does not make rows by their numbers, such as a Keras initializer.

    Args:
        initializer: The `initializer` argument.

    Raises:
        UsageError: If it is not such a function.
    """
    keras = sys.modules.get("keras")
    of_keras = keras is not None and isinstance(initializer, keras.initializers.Initializer)
    if of_keras or not callable(initializer):
        raise UsageError(
            "A table's initializer must be a function of (start, (count, ...)) that returns those rows and depends on their "
            "numbers "
            "only, so that each device can make its own slice",
            "Use gpudist_core.static.uniform(low, high, seed), or write such a function. Keras initializers draw the whole "
            "table.",
            initializer=type(initializer).__name__ if of_keras else initializer,
        )
