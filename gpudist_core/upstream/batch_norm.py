"""BatchNormalization of Keras 3 with the moments of the global batch.

Keras 3.15 uses each replica's own rows. With `synchronized=True` the variance is a difference of two sums, which has few digits
where the mean is large (TensorFlow's `_compute_moments_sync`), in three collectives; with a mask it takes its own rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from gpudist_core import share as shares
from gpudist_core.errors import WrongUse
from gpudist_core.gradients.reduction import all_reduce
from gpudist_core.upstream import run_state

_mode = threading.local()


@contextlib.contextmanager
def synchronizing(wanted: bool, *, compiled: bool = False) -> Iterator[None]:
    """While this thread traces a step: whether BatchNormalization takes the moments of the global batch, wherever a layer is.

    Args:
        wanted: Whether it does; else each takes those of its replica's rows, as Keras has it.
        compiled: Whether XLA compiles what is traced, which can then not wait for the other replicas.
    """
    install()
    outer = getattr(_mode, "wanted", False), getattr(_mode, "compiled", False)
    _mode.wanted, _mode.compiled = wanted, compiled
    try:
        yield
    finally:
        _mode.wanted, _mode.compiled = outer


@functools.cache
def install() -> None:
    """Teach Keras's BatchNormalization about replicas; outside a step of ours it does what it did."""
    import keras

    original = keras.layers.BatchNormalization._moments

    @functools.wraps(original)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        share = shares.current()
        if share is None or not are_of_all():
            return original(self, inputs, mask)
        if _mode.compiled and share.num_replicas > 1:
            raise WrongUse(
                "A pass compiled by XLA cannot wait for other replicas, as synchronised BatchNormalization does",
                "Leave jit_compile out, or give up the same result on every topology with synchronize_batch_norm=False.",
                layer=self.name,
            )
        self.synchronized = True
        return global_moments(share, inputs, mask, list(self._reduction_axes))

    keras.layers.BatchNormalization._moments = moments


def mark(model: Any) -> None:
    """Let the BatchNormalization layers of a model say what steps of ours do, before the first; others say it in their call.

    Args:
        model: A Keras model, or another callable.
    """
    for layer in run_state.flat_layers(model):
        if is_one(layer):
            layer.synchronized = True


def is_one(layer: Any) -> bool:
    """Whether a layer is a BatchNormalization."""
    import keras

    return isinstance(layer, keras.layers.BatchNormalization)


def are_of_all() -> bool:
    """Whether the step that this thread traces takes the moments of all replicas' rows."""
    return bool(getattr(_mode, "wanted", False))


def global_moments(share: shares.Share, inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any]:
    """Mean and variance over all replicas' rows.

    The replicas' moments are combined as Chan, Golub and LeVeque do (Updating Formulae and a Pairwise Algorithm, 1979), which
    does not lose digits as the difference of two sums does; one collective carries them all.

    Args:
        share: This replica's share of the step.
        inputs: Shape (rows, ...), floating; may have no rows.
        mask: What counts: the shape of inputs without its last dimension, or None.
        axes: The axes over which the moments are taken.

    Returns:
        Mean and variance, each of the shape of the axes that remain.
    """
    import tensorflow as tf

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
