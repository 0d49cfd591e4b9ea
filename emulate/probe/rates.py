"""Learning rates: what an optimizer starts with, and one that is made as many times as large as another run's."""

from __future__ import annotations

import functools
from typing import Any

from emulate.probe import upstream


def install(times: float) -> None:
    """Make the learning rate of all Keras 3 optimizers so many times as large."""
    for cls, method in upstream.rate_makers():
        _enlarge(cls, method, times)


def _enlarge(cls: Any, method: str, times: float) -> None:
    original = getattr(cls, method)

    @functools.wraps(original)
    def current(self: Any) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(original(self)) * times

    setattr(cls, method, current)


def first_rate(optimizer: Any) -> float | None:
    """The learning rate that an optimizer starts with: of a schedule that of its second step, which a warm-up begins above 0.

    Args:
        optimizer: Of any Keras.

    Returns:
        The rate, None where it cannot be told.
    """
    import numpy as np
    import tensorflow as tf

    rate = upstream.rate_of(optimizer)
    try:
        with tf.init_scope():
            number = rate(1) if callable(rate) and not hasattr(rate, "assign") else upstream.local_copies(rate)[0]
            return float(np.asarray(number))
    except Exception:  # a rate of the program's own making: whatever it raises here, it is not known
        return None
