"""Compute fingerprints of gradients and of examples, with NumPy and, equal to rounding, inside a TensorFlow step.

A gradient is seen as a matrix G of its last axis by all others. Its fingerprint is `NUM` numbers u'Gv, where u and v hold
random signs. Their mean square is the squared norm of G, so a difference D of two gradients moves them by about the norm of D.
They are linear: the replicas' fingerprints add up to that of the summed gradient.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM = 8
"""The number of projections of each tensor."""
START = -1
"""Stands for the step in the signs for variables before the first step."""
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_MIX = (-4658895280553007687, -7723592293110705685)  # SplitMix64's multipliers
_COLUMNS, _BITS = 1, np.arange(3, 3 + 7 * NUM, 7)
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def seed_of(name: str) -> int:
    """Return the seed of a tensor's random signs."""
    return zlib.crc32(name.encode())


def project(gradient: NDArray[Any], name: str, step: int) -> Floats:
    """Return the projections of a whole gradient.

    Args:
        gradient: Its values, in the variable's shape.
        name: The variable's name, which seeds the signs.
        step: The step, counted from 0, which seeds them, too.

    Returns:
        `NUM` numbers.
    """
    rows = gradient.reshape(-1, _width(gradient.shape)).astype(np.float64)
    signs = _signs(_numbers(np.arange(len(rows)), seed_of(name), step))
    return np.asarray((rows @ _column_signs(rows.shape[1]) * signs).sum(axis=0))


def examples_of(inputs: Sequence[NDArray[Any]]) -> Integers:
    """Return the fingerprint of a batch, in which the order of the examples does not matter.

    Args:
        inputs: The arrays that hold the examples, each with as many rows.

    Returns:
        The number of examples, the sum of their keys, and that of the squares of the keys, modulo 2**64. Parts of a batch add
        up to the batch.
    """
    keys = np.zeros(len(inputs[0]), np.int64)
    for place, array in enumerate(inputs):
        bits = _bits(array.reshape(len(array), math.prod(array.shape[1:])))
        keys += (bits * _weights(bits.shape[1], place)).sum(axis=1)
    return np.array([len(keys), keys.sum(), (keys * keys).sum()], np.int64)


def projected(gradients: Sequence[Any], names: Sequence[str], step: Any) -> Any:
    """Return the projections of a replica's gradients, as operations of a step: a product for each tensor, then few for all.

    Args:
        gradients: Tensors of floats, or `tf.IndexedSlices`.
        names: The names of their variables.
        step: The number of the step: an int64 scalar tensor.

    Returns:
        A float64 tensor of shape [tensors, NUM].
    """
    import tensorflow as tf

    products = [_product(gradient) for gradient in gradients]
    ends = tf.cumsum(tf.stack([tf.shape(product, tf.int64)[0] for product in products]))
    seeds = tf.constant([seed_of(name) for name in names], tf.int64)
    # searchsorted, as tf.repeat makes a mask of all rows for each tensor.
    owners = tf.searchsorted(ends, tf.range(ends[-1]), side="right")
    numbers = tf.concat([_row_numbers(gradient, product) for gradient, product in zip(gradients, products, strict=True)], 0)
    signs = _signs(_numbers(numbers, tf.gather(seeds, owners), step))
    # The number, as a sparse gradient may have no rows at its end.
    return tf.math.unsorted_segment_sum(tf.concat(products, 0) * signs, owners, len(products))


def examples_in(inputs: Sequence[Any]) -> Any:
    """Return the same as `examples_of`, for tensors of a step.

    Args:
        inputs: Dense tensors, whose shapes are known but for the number of rows.

    Returns:
        An int64 tensor of shape [3].
    """
    import tensorflow as tf

    rows = tf.shape(inputs[0])[0]
    keys = tf.zeros([rows], tf.int64)
    for place, tensor in enumerate(inputs):
        width = math.prod(tensor.shape[1:])
        bits = _bits_in(tf.reshape(tensor, [rows, width]))
        keys += tf.reduce_sum(bits * tf.constant(_weights(width, place)), axis=1)
    return tf.stack([tf.cast(rows, tf.int64), tf.reduce_sum(keys), tf.reduce_sum(keys * keys)])


def _width(shape: Sequence[int]) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _product(gradient: Any) -> Any:
    """Return the products of each row with the columns' signs."""
    import tensorflow as tf

    values = getattr(gradient, "values", gradient)
    width = _width(values.shape)
    wide = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
    signs = tf.constant(_column_signs(width), wide.dtype)
    return tf.cast(tf.matmul(tf.reshape(wide, [-1, width]), signs), tf.float64)


def _row_numbers(gradient: Any, product: Any) -> Any:
    """Return the number of each row of a gradient within its variable."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return tf.range(tf.shape(product, tf.int64)[0])
    each = math.prod(gradient.values.shape[1:-1])
    first = tf.cast(gradient.indices, tf.int64)[:, None] * each
    return tf.reshape(first + tf.range(each, dtype=tf.int64), [-1])


def _bits(rows: NDArray[Any]) -> Integers:
    if rows.dtype.kind != "f":
        return rows.astype(np.int64)
    if rows.dtype == np.float64:
        return np.ascontiguousarray(rows).view(np.int64)
    return np.ascontiguousarray(rows.astype(np.float32)).view(np.int32).astype(np.int64)


def _bits_in(rows: Any) -> Any:
    import tensorflow as tf

    if not rows.dtype.is_floating:
        return tf.cast(rows, tf.int64)
    if rows.dtype == tf.float64:
        return tf.bitcast(rows, tf.int64)
    return tf.cast(tf.bitcast(tf.cast(rows, tf.float32), tf.int32), tf.int64)


@functools.lru_cache(maxsize=8)
def _weights(width: int, place: int) -> Integers:
    """Return an odd number for each element of an example (multilinear hashing: Carter and Wegman 1979)."""
    return np.asarray(_numbers(np.arange(width), place, 0) | 1)


@functools.lru_cache(maxsize=64)
def _column_signs(width: int) -> Floats:
    return np.asarray(_signs(_numbers(np.arange(width), _COLUMNS, -1)))


def _numbers(places: Any, seed: Any, step: Any) -> Any:
    """Return random int64 numbers: SplitMix64 (Steele, Lea and Flood 2014, public domain) of place, seed and step."""
    if isinstance(places, np.ndarray):
        seed, step = np.array([seed]), np.array([step])  # arrays wrap around, where Python's integers grow
    return _mixed(places * _GOLDEN + (seed * _MIX[0] + step * _MIX[1]))


def _mixed(values: Any) -> Any:
    shift = _shift_of(values)
    values = (values ^ shift(values, 30)) * _MIX[0]
    values = (values ^ shift(values, 27)) * _MIX[1]
    return values ^ shift(values, 31)


def _signs(numbers: Any) -> Any:
    """Return `NUM` signs for each number, from bits of its own."""
    bits = _shift_of(numbers)(numbers[:, None], _BITS) & 1
    return 1.0 - 2.0 * (bits.astype(np.float64) if isinstance(bits, np.ndarray) else _as_floats(bits))


def _shift_of(values: Any) -> Callable[[Any, Any], Any]:
    """Return the arithmetic shift to the right, which TensorFlow's tensors have as no operator."""
    if isinstance(values, np.ndarray):
        return np.right_shift
    import tensorflow as tf

    return lambda tensor, by: tf.bitwise.right_shift(tensor, tf.constant(by, tf.int64))


def _as_floats(bits: Any) -> Any:
    import tensorflow as tf

    return tf.cast(bits, tf.float64)
