"""Convolutions of a replica without rows. TensorFlow 2.21's oneDNN kernels return the input as the output of an empty batch.

They get one row of zeros then, which is cut off again: a shape that is wrong would end the step in ReluGrad or in a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpudist_core import share as shares

OPERATIONS = ("conv2d", "conv3d", "depthwise_conv2d_native")


@functools.cache
def install() -> None:
    """Mend the operations behind every layer and `tf.nn` function, for steps of ours alone."""
    from tensorflow.python.ops import gen_nn_ops

    for name in OPERATIONS:
        setattr(gen_nn_ops, name, _with_a_row(getattr(gen_nn_ops, name)))


def _with_a_row(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def convolve(input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, by this name nn_ops passes it
        if shares.current() is None or not _may_be_empty(input):
            return operation(input, *args, **kwargs)
        import tensorflow as tf

        rows = tf.shape(input)[0]
        missing = tf.cast(rows == 0, tf.int32)
        padding = tf.concat([[[0, missing]], tf.zeros([input.shape.rank - 1, 2], tf.int32)], axis=0)
        # It copies nothing where nothing is missing. oneDNN would fuse a `Pad` with the convolution and lose the row.
        padded = tf.pad(input, padding, constant_values=tf.zeros([], input.dtype))
        padded.set_shape([None, *input.shape[1:]])
        output = operation(padded, *args, **kwargs)[:rows]
        return tf.ensure_shape(output, [input.shape[0], *output.shape[1:]])

    return convolve


def _may_be_empty(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and shape.rank is not None and shape[0] in (None, 0)
