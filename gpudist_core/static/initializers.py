"""First values of a sharded table that are the same on every topology: each row's depend on its number alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist_core.errors import WrongUse

Initializer = Callable[[int, tuple[int, ...]], Any]
"""A function (start, (count, *rest)) -> values of `count` rows from `start` on."""

_PAGE = 1024
"""Rows that share a generator: enough to be fast, few enough that little is drawn in vain at a slice's edges."""


def uniform(low: float = -0.05, high: float = 0.05, seed: int = 0) -> Callable[[int, tuple[int, ...]], NDArray[Any]]:
    """Uniform random rows, as `shard` takes them; the defaults are Keras's for embeddings.

    Args:
        low: The smallest value.
        high: The value that none reaches.
        seed: Another seed gives other values.

    Returns:
        A function of (start, (count, *rest)) that returns float32 values of that shape.

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
    """Refuse what does not make rows by their numbers, an initializer of Keras say.

    Args:
        initializer: What the user gave.

    Raises:
        WrongUse: It is none.
    """
    keras = sys.modules.get("keras")
    of_keras = keras is not None and isinstance(initializer, keras.initializers.Initializer)
    if of_keras or not callable(initializer):
        raise WrongUse(
            "A table's initializer is a function of (start, (count, ...)) that gives those rows, by their numbers alone, so "
            "that each device makes its own slice",
            "Take gpudist_core.static.uniform(low, high, seed), or write one: Keras's draw a table as a whole.",
            initializer=type(initializer).__name__ if of_keras else initializer,
        )
