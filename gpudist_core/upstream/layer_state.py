"""Control what layers keep in variables: the initial value, and the updates in a step.

In Keras 3.15 each replica assigns values from its own examples. So a running mean differs between replicas, and is NaN on a
replica without examples. In a gpudist step, a replica's value is treated as a mean over its examples. So a value that a layer
assigns in its call becomes the mean of all replicas' values, weighted by examples. For a running mean, and for values that do
not depend on examples, that is what one device assigns. Variables with an aggregation (`sum`, `only_first_replica`), integers,
and the states of recurrent layers, which belong to examples, are unchanged.

Initializers draw by seeds as layers do: a variable that is made in a step must start as it does outside of one.
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
from gpudist_core.gradients.reduction import all_reduce
from gpudist_core.state import PerThread
from gpudist_core.upstream import batch_norm
from gpudist_core.upstream.patches import Replacements

_left_alone = PerThread(False)


def replacements() -> Replacements:
    """Return what lets Keras's variables know replicas."""
    from keras.src import backend

    yield backend.Variable, "_direct_assign", _averaging
    yield backend.Variable, "_initialize_with_initializer", _drawing_outside
    yield keras.layers.RNN, "call", lambda original: _leaving_alone(original, lambda: True)
    # The moments of all examples are the same on all replicas already.
    yield keras.layers.BatchNormalization, "call", lambda original: _leaving_alone(original, batch_norm.are_of_all)


def _averaging(assign: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(assign)
    def direct_assign(self: Any, value: Any) -> Any:
        share = shares.current()
        if share is not None and in_call_of_a_layer():
            value = of_all(share, self, value)
        return assign(self, value)

    return direct_assign


def _drawing_outside(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def initialize_with_initializer(self: Any, initializer: Any) -> Any:
        @functools.wraps(initializer)
        def start(*args: Any, **kwargs: Any) -> Any:
            with shares.outside():
                return initializer(*args, **kwargs)

        return initialize(self, start)

    return initialize_with_initializer


def _leaving_alone(original: Callable[..., Any], is_wanted: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _left_alone.set(True) if is_wanted() else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return call


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
