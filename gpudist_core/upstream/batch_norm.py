"""Compute the BatchNormalization of Keras 3 with the moments of the global batch.

Keras 3.15 uses each replica's own examples. With `synchronized=True` it computes the variance as a difference of two sums,
which has few digits if the mean is large (TensorFlow's `_compute_moments_sync`), in three collectives. With a mask it uses its
own examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.gradients.reduction import all_reduce
from gpudist_core.state import PerThread
from gpudist_core.upstream import run_state
from gpudist_core.upstream.patches import Replacements

_mode = PerThread((False, False))


def synchronizing(wanted: bool, *, compiled: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Set, while this thread traces a step, whether BatchNormalization uses the moments of the global batch.

    Args:
        wanted: Whether to use them. Otherwise each replica uses its own examples, as in Keras.
        compiled: Whether XLA compiles the step, which then cannot wait for the other replicas.

    Returns:
        The context manager.
    """
    return _mode.set((wanted, compiled))


def replacements() -> Replacements:
    """Return what lets Keras's BatchNormalization know replicas."""
    yield keras.layers.BatchNormalization, "_moments", _of_all_rows


def _of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        share = shares.current()
        if share is None or not are_of_all():
            return original(self, inputs, mask)
        if _mode.value[1] and share.num_replicas > 1:
            raise UsageError(
                "A pass compiled by XLA cannot wait for other replicas, as synchronized BatchNormalization must",
                "Leave jit_compile out, or use synchronize_batch_norm=False, whose result depends on the topology.",
                layer=self.name,
            )
        self.synchronized = True
        return global_moments(share, inputs, mask, list(self._reduction_axes))

    return moments


def mark(model: Any) -> None:
    """Set `synchronized` on the BatchNormalization layers of a model before the first step. Other layers set it in their call.

    Args:
        model: A Keras model, or another callable.
    """
    for layer in run_state.flat_layers(model):
        if is_one(layer):
            layer.synchronized = True


def is_one(layer: Any) -> bool:
    """Return whether a layer is a BatchNormalization."""
    return isinstance(layer, keras.layers.BatchNormalization)


def are_of_all() -> bool:
    """Return whether the step that this thread traces uses the moments of all replicas' examples."""
    return _mode.value[0]


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
