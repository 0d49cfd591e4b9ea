"""Remember the last strategy of several replicas: a model made outside its scope is trained on one device only."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import tensorflow as tf

_last: list[weakref.ref[Any]] = []


def remember(strategy: tf.distribute.Strategy) -> Any:
    """Remember a strategy of several replicas for as long as it exists.

    Args:
        strategy: The new strategy.

    Returns:
        The same strategy.
    """
    if strategy.num_replicas_in_sync > 1:
        _last[:] = [weakref.ref(strategy)]
    return strategy


def warn_of_one_device(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Warn if a model is made outside every scope although a strategy with several replicas exists.

    Args:
        model: A model.
        strategy: The strategy that will train it.
    """
    if not _last or tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy() or _last[0]() is None:
        return
    gc.collect()
    last = _last[0]()
    if last is not None:
        warnings.warn(
            "A model must be made in the scope of a strategy to be trained on all devices. "
            f"Received: model={getattr(model, 'name', type(model).__name__)!r}, made outside of a scope. One device trains "
            "it alone: "
            f"{type(last).__name__} with {last.num_replicas_in_sync} replicas is not used. Make it under `with "
            "strategy.scope():`. To train on one device on purpose, use the scope of tf.distribute.OneDeviceStrategy.",
            stacklevel=3,
        )
