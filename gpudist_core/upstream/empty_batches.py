"""Fix operations that fail on a replica without examples.

- Convolutions: TensorFlow 2.21's oneDNN kernels return the input as the output of an empty batch. The wrong shape would end the
  step in ReluGrad or in a collective.
- Maxima: oneDNN's gradient of max pooling ends the process on an empty batch (`int32 expected, got float`).
- Padding by reflection (MelSpectrogram, image generators), the gradient of patches, the CTC loss: TensorFlow refuses an empty
  batch.
- Recurrent layers on a GPU: cuDNN does not support a batch of 0.
- Sums: Keras 3.15 takes a second summand of shape (0, n) for a bias, because it looks for the one dimension larger than 1. It
  calls BiasAdd, which refuses it. This affects LSTM and every residual connection.

All but sums get one row of zeros, which is removed again. Sums use TensorFlow's own operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.upstream.patches import Replacements

OPERATIONS = {
    "conv2d": "Conv2D",
    "conv3d": "Conv3D",
    "depthwise_conv2d_native": "DepthwiseConv2dNative",
    "max_pool": "MaxPool",
    "max_pool3d": "MaxPool3D",
    "max_pool_v2": "MaxPoolV2",
    "max_pool_with_argmax": "MaxPoolWithArgmax",
}


def replacements() -> Replacements:
    """Return replacements of the operations behind every layer and `tf.nn` function."""
    from keras.src.backend.tensorflow import numpy as keras_numpy
    from tensorflow.python.ops import gen_array_ops, gen_nn_ops

    for name, raw in OPERATIONS.items():
        yield gen_nn_ops, name, _with_a_row
        yield tf.raw_ops, raw, _with_a_row_by_name
    yield gen_array_ops, "extract_image_patches", _with_a_row
    yield gen_array_ops, "mirror_pad", _beside_rows
    yield tf.nn, "ctc_loss", _of_sequences
    yield tf.raw_ops, "CudnnRNNV3", with_a_sequence
    yield keras_numpy, "add", _without_a_bias


def _with_a_row(operation: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, by this name nn_ops passes it
    if shares.current() is None or not _may_be_empty(input):
        return operation(input, *args, **kwargs)
    rows = tf.shape(input)[0]
    padded = operation(_padded(input, 0, rows), *args, **kwargs)
    return tf.nest.map_structure(lambda output: tf.ensure_shape(output[:rows], [input.shape[0], *output.shape[1:]]), padded)


def _with_a_row_by_name(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args or "input" not in kwargs:
        return operation(*args, **kwargs)
    return _with_a_row(lambda input, **kwargs: operation(input=input, **kwargs), **kwargs)  # noqa: A006


def _beside_rows(mirror_pad: Callable[..., Any], input: Any, paddings: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    static_paddings = tf.get_static_value(tf.convert_to_tensor(paddings))
    if static_paddings is None or static_paddings[0].any():
        return mirror_pad(input, paddings, *args, **kwargs)
    return _with_a_row(mirror_pad, input, paddings, *args, **kwargs)


def _of_sequences(
    ctc_loss: Callable[..., Any],
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    logits_time_major: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    axis, given = 1 if logits_time_major else 0, (labels, logits, label_length, logit_length)
    is_plain = not args and kwargs.get("unique") is None and all(isinstance(value, tf.Tensor) for value in given)
    if shares.current() is None or not is_plain or logits.shape.rank != 3 or logits.shape[axis] not in (None, 0):
        return ctc_loss(*given, logits_time_major, *args, **kwargs)
    rows = tf.shape(logits)[axis]
    lengths = _padded(label_length, 0, rows), _padded(logit_length, 0, rows, 1)
    losses = ctc_loss(_padded(labels, 0, rows), _padded(logits, axis, rows), *lengths, logits_time_major, **kwargs)
    return tf.ensure_shape(losses[:rows], [logits.shape[axis]])


def _padded(value: Any, axis: int, rows: Any, filler: int = 0) -> Any:
    """Append a row if there is none. Nothing is copied otherwise."""
    missing = tf.cast(rows == 0, tf.int32)
    padding = tf.one_hot(axis, value.shape.rank, dtype=tf.int32)[:, None] * tf.stack([0, missing])[None]
    # oneDNN would fuse a `Pad` with a convolution and lose the row.
    padded = tf.pad(value, padding, constant_values=tf.constant(filler, value.dtype))
    padded.set_shape([None if at == axis else size for at, size in enumerate(value.shape)])
    return padded


def with_a_sequence(
    operation: Callable[..., Any],
    *,
    input: Any,  # noqa: A002
    sequence_lengths: Any,
    time_major: bool = True,
    **kwargs: Any,
) -> Any:
    """Give `CudnnRNNV3`, which gets its arguments from Keras by name, a row if there is none."""
    axis = 1 if time_major else 0
    if shares.current() is None or input.shape.rank != 3 or input.shape[axis] not in (None, 0):
        return operation(input=input, sequence_lengths=sequence_lengths, time_major=time_major, **kwargs)
    rows = tf.shape(input)[axis]
    states = {name: _padded(kwargs[name], axis, rows) for name in ("input_h", "input_c") if _has_rows(kwargs.get(name))}
    lengths = _padded(sequence_lengths, 0, rows, 1)
    outputs = operation(
        input=_padded(input, axis, rows), sequence_lengths=lengths, time_major=time_major, **{**kwargs, **states}
    )
    cut = [(output[:, :rows] if time_major else output[:rows]) if _has_rows(output) else output for output in outputs[:3]]
    return (*cut, *outputs[3:])


def _has_rows(value: Any) -> bool:
    """Return whether a value has rows. A GRU has no cell, and passes a scalar in its place."""
    shape = getattr(value, "shape", None)
    return shape is not None and shape.rank == 3


def _without_a_bias(add: Callable[..., Any], x1: Any, x2: Any) -> Any:
    shape: Any = getattr(x2, "shape", ())
    if shares.current() is None or len(shape) < 2 or shape[0] != 0:
        return add(x1, x2)
    if len(getattr(x1, "shape", ())) < 2:
        return add(x2, x1)
    dtype = keras.backend.result_type(x1.dtype, x2.dtype)
    return tf.cast(x1, dtype) + tf.cast(x2, dtype)


def _may_be_empty(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and shape.rank is not None and shape[0] in (None, 0)
