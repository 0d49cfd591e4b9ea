"""Convolutions of a replica without rows: TensorFlow's fault, and how it is kept out of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.upstream import empty_batches

Convolve = Callable[[Any, Any], Any]
CONVOLUTIONS: dict[str, tuple[Convolve, tuple[int, ...], tuple[int, ...]]] = {
    "conv2d": (lambda x, w: tf.nn.conv2d(x, w, 2, "VALID"), (8, 8, 1), (3, 3, 1, 4)),
    "conv3d": (lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "VALID"), (5, 5, 5, 1), (3, 3, 3, 1, 4)),
    "depthwise": (lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "VALID"), (8, 8, 2), (3, 3, 2, 3)),
    # Its gradient is a convolution.
    "transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, tf.stack([tf.shape(x)[0], 6, 6, 3]), 1, "VALID"),
        (4, 4, 6),
        (3, 3, 3, 6),
    ),
    "conv1d": (lambda x, w: tf.nn.conv1d(x, w, 1, "VALID"), (8, 2), (3, 2, 4)),
}


def in_step(convolve: Convolve, x: Any, w: Any) -> tuple[Any, Any, Any]:
    empty_batches.install()
    with shares.sharing(shares.Share(tf.shape(x)[0])):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            output = convolve(x, w)
            total = tf.reduce_sum(tf.nn.relu(output))
        return output, *tape.gradient(total, [w, x])


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("known", [True, False])
def test_a_convolution_in_a_step_has_the_right_shape_and_gradient_with_and_without_rows(
    name: str, rows: int, known: bool
) -> None:
    convolve, shape, filters = CONVOLUTIONS[name]
    x, w = np.random.default_rng(1).random((rows, *shape), np.float32), tf.ones(filters)
    step = tf.function(
        lambda x: in_step(convolve, x, w), input_signature=[tf.TensorSpec((rows if known else None, *shape), tf.float32)]
    )
    output, gradient, of_input = step(x)
    alone = convolve(tf.ones((1, *shape)), w)
    assert output.shape == (rows, *alone.shape[1:])
    np.testing.assert_allclose(output, np.concatenate([convolve(row[None], w) for row in x]) if rows else output, rtol=1e-5)
    assert (gradient.shape, of_input.shape) == (filters, x.shape)
    assert bool(tf.reduce_all(gradient == 0)) == (rows == 0)


def test_tensorflow_still_returns_the_input_of_an_empty_convolution() -> None:
    from tensorflow.python.ops import gen_nn_ops
    from tensorflow.python.util import _pywrap_util_port

    real = gen_nn_ops.conv2d
    assert all(callable(getattr(gen_nn_ops, name)) for name in empty_batches.OPERATIONS)
    output = real(tf.zeros((0, 8, 8, 1)), tf.ones((3, 3, 1, 4)), strides=[1] * 4, padding="VALID")
    mended = output.shape[1:] == (6, 6, 4)
    assert not (mended and _pywrap_util_port.IsMklEnabled()), "Mended: gpudist_core/upstream/empty_batches.py can go."
