"""Find what Keras's callbacks keep from epoch to epoch, and the callbacks beside one of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras

# By the class's name: Keras 3.12, the last one for Python 3.10, has no OrbaxCheckpoint.
_KEPT = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
# Given by the list, or made anew of what a callback is told.
_OF_KERAS = ("_current_epoch", "_model", "min_delta", "monitor_op", "params", "validation_data")


def kept_by(callback: Any) -> tuple[str, ...]:
    """Return the attributes in which a callback of Keras, or a subclass, keeps state for later epochs."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _KEPT and cls is getattr(keras.callbacks, cls.__name__, None):
            return _KEPT[cls.__name__]
    return ()


def attributes_of(callback: Any) -> dict[str, Any]:
    """Return a callback's own attributes, except for those that the list sets or `kept_by` names; none for Keras's classes."""
    if type(callback).__module__.split(".")[0] in ("keras", "gpudist_core"):
        return {}
    excluded = (*_OF_KERAS, *kept_by(callback))
    return {name: value for name, value in vars(callback).items() if name not in excluded}


class _Last:
    """Stand at the end of a list of callbacks while they start the training."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self.functions: list[Callable[[list[Any]], None]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self._callbacks[:] = [callback for callback in self._callbacks if callback is not self]
        for function in self.functions:
            function(self._callbacks)


def after_all_begin(callback: Any, function: Callable[[list[Any]], None]) -> None:
    """Call a function with the list of callbacks after all of them have started the training.

    Keras gives a callback no access to the list, so it is found among the callers.

    Args:
        callback: A callback in its `on_train_begin`. If no list of callbacks has called it, nothing happens.
        function: A function of the list. It may sort it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list) and any(listed is callback for listed in callbacks):
            if not isinstance(callbacks[-1], _Last):
                callbacks.append(_Last(callbacks))  # the loop over the list comes to it
            callbacks[-1].functions.append(function)
            return
        frame = frame.f_back
