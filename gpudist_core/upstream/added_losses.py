"""Keep the losses that layers add in a call (`add_loss`, activity regularizers) apart for each replica.

Keras 3.15 keeps them in a list of the layer (`Layer._losses`), which all replicas share. If one replica waits for the others in
the middle of a step, the next replica's call clears its losses, and it then reads the losses of another replica.

Keras 3.12, the last version for Python 3.10, sums an activity regularizer over the examples of a batch. Keras 3.15 takes the
mean. A gpudist step treats all losses of inputs as means, so such a sum is scaled to the right sum over the replicas. So are
values by example, which Keras sums.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.upstream.patches import Replacements


def replacements() -> Replacements:
    """Return what lets Keras's layers know replicas."""
    from keras.src.layers.layer import Layer

    adds_up_rows = _adds_up_rows()
    yield Layer, "add_loss", lambda original: _adding(original, adds_up_rows=adds_up_rows)
    yield Layer, "_get_own_losses", _getting
    yield Layer, "_clear_losses", _clearing


def _adding(add: Callable[..., Any], *, adds_up_rows: bool) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_loss(self: Any, loss: Any) -> Any:
        kept = _kept()
        if kept is None:
            return add(self, loss)
        if adds_up_rows and _is_of_activities(sys._getframe(1)):
            loss = keras.tree.map_structure(_as_mean, loss)
        else:
            loss = keras.tree.map_structure(_by_row, loss)
        kept.setdefault(id(self), []).extend(keras.tree.flatten(loss))
        return None

    return add_loss


def _getting(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_own_losses(self: Any) -> Any:
        kept = _kept()
        return own(self) if kept is None else list(kept.get(id(self), []))

    return get_own_losses


def _clearing(clear: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clear)
    def clear_losses(self: Any) -> None:
        kept = _kept()
        if kept is None:
            clear(self)
        else:
            kept.pop(id(self), None)
            for layer in self._layers:
                layer._clear_losses()

    return clear_losses


def _adds_up_rows() -> bool:
    """Return whether an activity regularizer of two examples is twice that of one."""
    from keras import layers

    with tf.init_scope():
        # It has a name, so that Keras does not count it among the program's own layers.
        layer = layers.Identity(activity_regularizer=tf.reduce_sum, dtype="float32", name="two_rows")
        layer(tf.ones([2, 1]))
        return bool(float(layer.losses[0]) == 2.0)


def _is_of_activities(caller: FrameType) -> bool:
    """Return whether Keras itself adds the loss, for what a layer has just returned."""
    return caller.f_code.co_name == "__call__" and caller.f_globals.get("__name__") == "keras.src.layers.layer"


def _as_mean(loss: Any) -> Any:
    """Scale a sum over this replica's examples as if each example of the global batch had this replica's mean."""
    share = shares.current()
    assert share is not None
    return loss * tf.cast(tf.math.reciprocal_no_nan(share.fraction), loss.dtype)


def _by_row(loss: Any) -> Any:
    """Turn a loss with a value for each example, which Keras sums, into one with the right sum over the replicas."""
    share = shares.current()
    assert share is not None
    shape = tf.TensorShape(getattr(loss, "shape", ()))
    is_by_row = bool(shape.rank) and shape[0] in (None, tf.get_static_value(share.rows))
    return _as_mean(loss) if is_by_row and share.num_replicas > 1 else loss


def _kept() -> dict[int, list[Any]] | None:
    """Return the losses that this replica's layers added in the traced step.

    None outside, and if Keras keeps them apart itself.
    """
    from keras.src import backend

    share = shares.current()
    return None if share is None or backend.in_stateless_scope() else share.added_losses
