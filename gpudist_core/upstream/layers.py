"""Let layers of Keras 3 know replicas: BatchNormalization, the variables that layers assign, the losses that they add.

The BatchNormalization of Keras 3.15 uses each replica's own examples. With `synchronized=True` it computes the variance as a
difference of two sums, which has few digits if the mean is large (TensorFlow's `_compute_moments_sync`), in three collectives.
With a mask it uses its own examples. Here it has the moments of the global batch.

In Keras 3.15 each replica assigns values from its own examples. So a running mean differs between replicas, and is NaN on a
replica without examples. In a gpudist step, a replica's value is treated as a mean over its examples. So a value that a layer
assigns in its call becomes the mean of all replicas' values, weighted by examples. For a running mean, and for values that do
not depend on examples, that is what one device assigns. Variables with an aggregation (`sum`, `only_first_replica`), integers,
and the states of recurrent layers, which belong to examples, are unchanged.

Initializers draw by seeds as layers do: a variable that is made in a step must start as it does outside of one.

Keras 3.15 keeps the losses that layers add in a call (`add_loss`, activity regularizers) in a list of the layer
(`Layer._losses`), which all replicas share. If one replica waits for the others in the middle of a step, the next replica's
call clears its losses, and it then reads the losses of another replica. Here they are kept apart for each replica.

Keras 3.12, the last version for Python 3.10, sums an activity regularizer over the examples of a batch. Keras 3.15 takes the
mean. A gpudist step treats all losses of inputs as means, so such a sum is scaled to the right sum over the replicas. So are
values by example, which Keras sums.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.gradients import all_reduce
from gpudist_core.state import PerThread
from gpudist_core.upstream import patches, runtime
from gpudist_core.upstream.patches import Replacements

_batch_norm_mode = PerThread((False, False))


def synchronizing_batch_norm(wanted: bool, *, compiled: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Set, while this thread traces a step, whether BatchNormalization uses the moments of the global batch.

    Args:
        wanted: Whether to use them. Otherwise each replica uses its own examples, as in Keras.
        compiled: Whether XLA compiles the step, which then cannot wait for the other replicas.

    Returns:
        The context manager.
    """
    return _batch_norm_mode.set((wanted, compiled))


def replacements() -> Replacements:
    """Return what lets Keras's layers and their variables know replicas."""
    from keras.src import backend
    from keras.src.layers.layer import Layer

    yield Layer, "add_loss", functools.partial(_adding, adds_up_rows=_adds_up_rows())
    yield Layer, "_get_own_losses", _getting
    yield Layer, "_clear_losses", _clearing
    yield backend.Variable, "_direct_assign", _averaging
    yield backend.Variable, "_initialize_with_initializer", _drawing_outside
    yield keras.layers.RNN, "call", functools.partial(_leaving_alone, is_wanted=lambda: True)
    # The moments of all examples are the same on all replicas already.
    yield keras.layers.BatchNormalization, "call", functools.partial(_leaving_alone, is_wanted=moments_are_of_all)
    yield keras.layers.BatchNormalization, "_moments", _of_all_rows


def _of_all_rows(original: Callable[..., Any], self: Any, inputs: Any, mask: Any) -> Any:
    share = shares.current()
    if share is None or not moments_are_of_all():
        return original(self, inputs, mask)
    if _batch_norm_mode.value[1] and share.num_replicas > 1:
        raise UsageError(
            "A pass compiled by XLA cannot wait for other replicas, as synchronized BatchNormalization must",
            "Leave jit_compile out, or use synchronize_batch_norm=False, whose result depends on the topology.",
            layer=self.name,
        )
    self.synchronized = True
    return global_moments(share, inputs, mask, list(self._reduction_axes))


def mark_batch_norm(model: Any) -> None:
    """Set `synchronized` on the BatchNormalization layers of a model before the first step. Other layers set it in their call.

    Args:
        model: A Keras model, or another callable.
    """
    for layer in runtime.flat_layers(model):
        if is_batch_norm(layer):
            layer.synchronized = True


def is_batch_norm(layer: Any) -> bool:
    """Return whether a layer is a BatchNormalization."""
    return isinstance(layer, keras.layers.BatchNormalization)


def moments_are_of_all() -> bool:
    """Return whether the step that this thread traces uses the moments of all replicas' examples."""
    return _batch_norm_mode.value[0]


def global_moments(share: shares.Share, inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any]:
    """Return mean and variance over the examples of all replicas, in one collective.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm, 1979. The method does not lose digits as the
    difference of two sums does.

    Args:
        share: This replica's share of the step.
        inputs: A floating tensor of shape (rows, ...), perhaps with 0 rows.
        mask: What counts: the shape of inputs without its last dimension, or None.
        axes: The axes over which the moments are computed.

    Returns:
        Mean and variance, each with the shape of the remaining axes.
    """
    weights = tf.ones_like(inputs) if mask is None else tf.cast(mask, inputs.dtype)[..., None] * tf.ones_like(inputs)
    count = tf.reduce_sum(weights, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * weights, axes), count)
    shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]
    squares = tf.reduce_sum(weights * tf.square(inputs - tf.reshape(mean, shape)), axes)
    if share.num_replicas > 1:
        place = tf.one_hot(share.replica, share.num_replicas, dtype=inputs.dtype)[:, None, None]
        counts, means, all_squares = tf.unstack(all_reduce(place * tf.stack([count, mean, squares])), axis=1)
        count = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
        squares = tf.reduce_sum(all_squares + counts * tf.square(means - mean), 0)
    return mean, tf.math.divide_no_nan(squares, count)


_left_alone = PerThread(False)


def _averaging(assign: Callable[..., Any], self: Any, value: Any) -> Any:
    share = shares.current()
    if share is not None and in_call_of_a_layer():
        value = of_all(share, self, value)
    return assign(self, value)


def _drawing_outside(initialize: Callable[..., Any], self: Any, initializer: Any) -> Any:
    @functools.wraps(initializer)
    def start(*args: Any, **kwargs: Any) -> Any:
        with shares.outside():
            return initializer(*args, **kwargs)

    return initialize(self, start)


def _leaving_alone(original: Callable[..., Any], self: Any, *args: Any, is_wanted: Callable[[], bool], **kwargs: Any) -> Any:
    with _left_alone.set(True) if is_wanted() else contextlib.nullcontext():
        return original(self, *args, **kwargs)


def in_call_of_a_layer() -> bool:
    """Return whether a layer's or a model's call is being traced."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("current_call_ctx") is not None


def of_all(share: shares.Share, variable: Any, value: Any) -> Any:
    """Return the value that a layer's variable gets, from the value on this replica.

    Args:
        share: This replica's share of the step.
        variable: A Keras variable.
        value: A tensor of its shape: a function of the means over this replica's examples.

    Returns:
        For a floating variable that is not trained and aggregates by `mean` or `none`: the mean of all replicas' values,
            weighted
        by examples. Otherwise the value.
    """
    if share.num_replicas == 1 or not is_of_rows(variable) or _left_alone.value:
        return value
    if not share.can_meet():
        warnings.warn(
            "A layer must assign its variables outside of loops and branches of the graph, where collectives do not work. "
            f"Received: variable={variable.path!r}. Each replica keeps the value of its own examples. Use "
            "keras.ops.where instead of a branch.",
            stacklevel=2,
        )
        return value
    kept = variable._value  # what `value` gives in a layer's call may be cast to 16 bits
    value = tf.cast(value, kept.dtype)
    before = kept.read_value()
    before = tf.where(tf.math.is_finite(before), before, tf.zeros_like(before))
    # The change is averaged: of what is the same on all replicas the sum of the fractions takes next to nothing away.
    change = tf.math.multiply_no_nan(value - before, tf.cast(share.fraction, value.dtype))
    return before + all_reduce(change)


def is_of_rows(variable: Any) -> bool:
    """Return whether the value that a layer assigns to a Keras variable is treated as a mean over examples."""
    return not variable.trainable and variable.aggregation in ("mean", "none") and variable._value.dtype.is_floating


def _adding(add: Callable[..., Any], self: Any, loss: Any, *, adds_up_rows: bool) -> Any:
    kept = _kept()
    if kept is None:
        return add(self, loss)
    by = patches.caller()
    # Keras itself adds the loss, for what a layer has just returned.
    is_of_activities = by.f_code.co_name == "__call__" and by.f_globals.get("__name__") == "keras.src.layers.layer"
    loss = keras.tree.map_structure(_as_mean if adds_up_rows and is_of_activities else _by_row, loss)
    kept.setdefault(id(self), []).extend(keras.tree.flatten(loss))
    return None


def _getting(own: Callable[..., Any], self: Any) -> Any:
    kept = _kept()
    return own(self) if kept is None else list(kept.get(id(self), []))


def _clearing(clear: Callable[..., Any], self: Any) -> None:
    kept = _kept()
    if kept is None:
        clear(self)
    else:
        kept.pop(id(self), None)
        for layer in self._layers:
            layer._clear_losses()


def _adds_up_rows() -> bool:
    """Return whether an activity regularizer of two examples is twice that of one."""
    from keras import layers

    with tf.init_scope():
        # It has a name, so that Keras does not count it among the program's own layers.
        layer = layers.Identity(activity_regularizer=tf.reduce_sum, dtype="float32", name="two_rows")
        layer(tf.ones([2, 1]))
        return bool(float(layer.losses[0]) == 2.0)


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
