"""BatchNormalization of Keras 3 with the moments of the global batch.

Keras 3.15 uses each replica's own rows. With `synchronized=True` the variance is a difference of two sums, which has few digits
where the mean is large (TensorFlow's `_compute_moments_sync`), in three collectives; with a mask it takes its own rows.
"""

from __future__ import annotations

from typing import Any

from gpudist_core import share as shares
from gpudist_core.gradients.reduction import all_reduce
from gpudist_core.upstream import classes


def synchronize(model: Any) -> int:
    """Make all BatchNormalization layers of a model use the moments of the global batch in a step of gpudist_core.

    Args:
        model: A Keras model or layer; it is changed in place. Outside a step the layers do what they did.

    Returns:
        How many layers there are.
    """
    import keras

    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else []
    found = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in found:
        classes.mix_in(layer, _GlobalMoments)
        layer.synchronized = True
    return len(found)


class _GlobalMoments:
    """A BatchNormalization whose moments are those of all replicas' rows."""

    def _moments(self, inputs: Any, mask: Any) -> Any:
        me: Any = self
        share = shares.current()
        if share is None:
            return super()._moments(inputs, mask)  # type: ignore[misc]
        return global_moments(share, inputs, mask, list(me._reduction_axes))


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
