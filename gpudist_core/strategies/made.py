"""The last strategy of several replicas that was made: what is trained outside its scope is trained on one device alone."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

_last: list[weakref.ref[Any]] = []


def remember(strategy: Any) -> Any:
    """Keep in mind, as long as it lives, that there is a strategy of several replicas.

    Args:
        strategy: What was made.

    Returns:
        The same.
    """
    if strategy.num_replicas_in_sync > 1:
        _last[:] = [weakref.ref(strategy)]
    return strategy


def warn_of_one_device(model: Any, strategy: Any) -> None:
    """Tell who made a model outside every scope, with a strategy at hand, that the other devices will have no part in it.

    Args:
        model: A model.
        strategy: The one that it will be trained with.
    """
    import tensorflow as tf

    if not _last or tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy() or _last[0]() is None:
        return
    gc.collect()
    made = _last[0]()
    if made is not None:
        warnings.warn(
            "A model is trained by all devices when it is made in the scope of a strategy. "
            f"Received: model={getattr(model, 'name', type(model).__name__)!r}, made outside; {type(made).__name__} with "
            f"{made.num_replicas_in_sync} replicas is not used, so one device trains it alone. Make it under `with "
            "strategy.scope():`; where one device is meant, make it in the scope of tf.distribute.OneDeviceStrategy.",
            stacklevel=3,
        )
