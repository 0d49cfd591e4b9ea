"""Find what Keras's callbacks keep from epoch to epoch, and tell `Checkpoints` of the other callbacks."""

from __future__ import annotations

import functools
from typing import Any

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
    import keras

    for cls in type(callback).__mro__:
        if cls.__name__ in _KEPT and cls is getattr(keras.callbacks, cls.__name__, None):
            return _KEPT[cls.__name__]
    return ()


def attributes_of(callback: Any) -> dict[str, Any]:
    """Return a callback's own attributes, except for those that the list sets or `kept_by` names; none for Keras's classes."""
    if type(callback).__module__.split(".")[0] in ("keras", "gpudist_core"):
        return {}
    known = (*_OF_KERAS, *kept_by(callback))
    return {name: value for name, value in vars(callback).items() if name not in known}


@functools.cache
def install() -> None:
    """Patch `CallbackList` to pass the list of callbacks to those with `all_begun`, after all have started the training."""
    import keras

    original = keras.callbacks.CallbackList.on_train_begin

    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        for callback in list(self.callbacks):
            if hasattr(callback, "all_begun"):
                callback.all_begun(self.callbacks)

    keras.callbacks.CallbackList.on_train_begin = on_train_begin
