"""Record learning rates, and multiply a rate by a factor in a comparison run."""

from __future__ import annotations

from typing import Any

from emulate.probe import upstream
from emulate.probe.point import around


def install(times: float) -> None:
    """Make the learning rate of all Keras 3 optimizers so many times as large."""
    for cls, method in upstream.rate_makers():
        _enlarge(cls, method, times)


def _enlarge(cls: Any, method: str, times: float) -> None:
    @around(cls, method)
    def current(original: Any, self: Any) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(original(self)) * times


def settings_of(optimizer: Any) -> dict[str, float]:
    """Return an optimizer's settings except for its learning rate: momentum, decay, clipping.

    Args:
        optimizer: Of any Keras.

    Returns:
        Its public attributes that are plain numbers.
    """
    attributes = getattr(optimizer, "__dict__", {}).items()
    return {name: float(value) for name, value in attributes if isinstance(value, (int, float)) and not name.startswith("_")}


def is_scheduled(optimizer: Any) -> bool:
    """Return whether an optimizer's learning rate changes with its steps."""
    rate = upstream.rate_of(optimizer)
    return callable(rate) and not hasattr(rate, "assign")


def first_rate(optimizer: Any) -> float | None:
    """Return an optimizer's initial learning rate; for a schedule that of the second step, because a warm-up starts at 0.

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
            number = rate(1) if is_scheduled(optimizer) else upstream.local_copies(rate)[0]
            return float(np.asarray(number))
    except Exception:  # a rate of the program's own making: whatever it raises here, it is not known
        return None
