"""What fails on a replica without rows: faults of TensorFlow and Keras, and how they are kept out of steps."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
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


OTHERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "max_pool": (lambda x: tf.nn.max_pool(x, 2, 2, "VALID"), (8, 8, 2)),
    "max_pool1d": (lambda x: tf.nn.max_pool1d(x, 3, 2, "SAME"), (8, 2)),
    "max_pool3d": (lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), (4, 4, 4, 2)),
    "v1": (lambda x: tf.compat.v1.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"), (8, 8, 2)),
    "pool": (lambda x: tf.nn.pool(x, [2, 2], "MAX", dilations=[2, 2]), (8, 8, 2)),
    "with argmax": (lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")[0], (8, 8, 2)),
    "raw": (lambda x: tf.raw_ops.MaxPool(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"), (8, 8, 2)),
    "reflected": (lambda x: tf.pad(x, [[0, 0], [2, 1], [0, 0]], "REFLECT"), (8, 2)),
    "patches": (lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"), (8, 8, 2)),
    "ctc": (lambda x: keras.losses.ctc(tf.ones((tf.shape(x)[0], 2), tf.int32), x), (6, 5)),
    "ctc, time first": (lambda x: _ctc(tf.transpose(x, [1, 0, 2])), (6, 5)),
}


def _ctc(x: Any) -> Any:
    rows = tf.shape(x)[1]
    return tf.nn.ctc_loss(tf.ones((rows, 2), tf.int32), x, tf.fill([rows], 2), tf.fill([rows], 6), blank_index=0)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("known", [True, False])
def test_maxima_reflections_patches_and_ctc_are_right_in_a_step_with_and_without_rows(
    name: str, rows: int, known: bool
) -> None:
    call, shape = OTHERS[name]

    @tf.function(input_signature=[tf.TensorSpec((rows if known else None, *shape), tf.float32)])
    def step(x: Any) -> Any:
        with shares.sharing(shares.Share(tf.shape(x)[0])), tf.GradientTape() as tape:
            tape.watch(x)
            output = call(x)
        return output, tape.gradient(output, x)

    x = tf.constant(np.random.default_rng(1).random((max(rows, 1), *shape), np.float32))
    with tf.GradientTape() as tape:
        tape.watch(x)
        right = call(x)
    of_input = tape.gradient(right, x)
    for seen, expected in zip(step(x[:rows]), (right, of_input), strict=True):
        np.testing.assert_allclose(seen, expected[:rows], rtol=1e-5, atol=1e-6)


def test_rows_that_are_reflected_themselves_are_left_to_tensorflow() -> None:
    step = tf.function(lambda x: tf.pad(x, [[1, 1], [0, 0]], "SYMMETRIC"), input_signature=[tf.TensorSpec((None, 2))])
    with shares.sharing(shares.Share(tf.constant(2))):
        assert step(tf.ones((2, 2))).shape == (4, 2)


@pytest.mark.slow
def test_onednn_still_ends_the_process_in_the_gradient_of_an_empty_maximum() -> None:
    from tensorflow.python.util import _pywrap_util_port

    program = (
        "import tensorflow as tf\n"
        "@tf.function\n"
        "def step(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        tape.watch(x)\n"
        "        y = tf.nn.max_pool2d(x, 2, 2, 'VALID')\n"
        "    return tape.gradient(y, x)\n"
        "step(tf.zeros([0, 6, 6, 4]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode != 0 or not _pywrap_util_port.IsMklEnabled(), "Mended: empty_batches.py can leave maxima out."


def test_tensorflow_still_returns_the_input_of_an_empty_convolution() -> None:
    from tensorflow.python.ops import gen_nn_ops
    from tensorflow.python.util import _pywrap_util_port

    real = gen_nn_ops.conv2d
    assert all(callable(getattr(gen_nn_ops, name)) for name in empty_batches.OPERATIONS)
    output = real(tf.zeros((0, 8, 8, 1)), tf.ones((3, 3, 1, 4)), strides=[1] * 4, padding="VALID")
    mended = output.shape[1:] == (6, 6, 4)
    assert not (mended and _pywrap_util_port.IsMklEnabled()), "Mended: gpudist_core/upstream/empty_batches.py can go."


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("known", [True, False])
def test_a_recurrent_layer_and_a_residual_sum_do_without_rows(layer: str, known: bool) -> None:
    inputs = keras.Input((5, 4))
    state = getattr(keras.layers, layer)(4)(inputs)
    model = keras.Model(inputs, keras.layers.add([keras.layers.Dense(4)(state), state]))

    @tf.function(input_signature=[tf.TensorSpec((0 if known else None, 5, 4))])
    def step(x: Any) -> Any:
        with shares.sharing(shares.Share(tf.shape(x)[0])):
            with tf.GradientTape() as tape:
                output = model(x, training=True)
                total = tf.reduce_sum(output)
            return output, tape.gradient(total, model.trainable_variables)

    output, gradients = step(tf.zeros((0, 5, 4)))
    assert output.shape == (0, 4)
    assert all(bool(tf.reduce_all(gradient == 0)) for gradient in gradients)


def test_keras_still_takes_an_empty_summand_for_a_bias() -> None:
    empty = tf.zeros((0, 24))
    try:
        keras.ops.add(empty, empty)
    except (tf.errors.InvalidArgumentError, ValueError):
        pass
    else:
        pytest.fail("Mended: the sums of gpudist_core/upstream/empty_batches.py can go.")
    with shares.sharing(shares.Share(tf.constant(0))):
        assert keras.ops.add(empty, empty).shape == (0, 24)
        assert keras.ops.add(tf.ones(24), empty).shape == (0, 24)
        assert keras.ops.add(1.0, empty).shape == (0, 24)
        assert keras.ops.add(tf.zeros((0, 24), tf.float16), empty).dtype == tf.float32


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("has_cell", [True, False])
def test_cudnn_never_gets_a_batch_without_rows(rows: int, time_major: bool, has_cell: bool) -> None:
    seen: list[Any] = []

    def kernel(*, input: Any, input_h: Any, input_c: Any, sequence_lengths: Any, time_major: bool, rnn_mode: str) -> Any:  # noqa: A002
        seen.append([tuple(input.shape), tuple(input_h.shape), sequence_lengths.numpy().tolist()])
        return input[..., :3], input_h, input_c, None, None

    run = functools.partial(empty_batches.with_a_sequence, kernel)
    x = tf.zeros((5, rows, 4) if time_major else (rows, 5, 4))
    state = tf.zeros((1, rows, 3) if time_major else (rows, 1, 3))
    cell = state if has_cell else tf.constant(0.0)
    with shares.sharing(shares.Share(tf.constant(rows))):
        output, h, c, _, _ = run(
            input=x, input_h=state, input_c=cell, sequence_lengths=tf.fill([rows], 5), time_major=time_major, rnn_mode="lstm"
        )
    most = max(rows, 1)
    given = [(5, most, 4), (1, most, 3)] if time_major else [(most, 5, 4), (most, 1, 3)]
    assert seen == [[*given, [5] * rows or [1]]]
    assert (output.shape, h.shape, c.shape) == ((*x.shape[:2], 3), state.shape, cell.shape)


def test_keras_runs_its_recurrent_layers_on_cudnn_by_the_operation_that_is_mended() -> None:
    from keras.src.backend.tensorflow.rnn import lstm

    assert "tf.raw_ops.CudnnRNNV3(" in inspect.getsource(sys.modules[lstm.__module__])
