"""Draw random numbers of Keras 3 layers in a step: differently on each replica, or by the example's index.

Keras 3.15 keeps the same seed on all replicas, so a `Dropout` draws the same mask for the first example of each replica.
Keras's layers draw with the functions of `keras.src.backend.tensorflow.random`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.state import PerThread
from gpudist_core.upstream.patches import Replacements

_mode: PerThread[str | None] = PerThread(None)
# What a test harness that watches draws sets: that it gives each row its own, or how it looks away from a draw for all rows.
rows_are_keyed = False
unwatched: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
DRAWS = ("replica", "row")
"""The ways to draw random numbers."""
SHAPED = ("normal", "uniform", "truncated_normal", "randint")
WITH_PARAMETERS = ("gamma", "beta", "binomial")
MIXING = ("shuffle", "categorical")


def drawing(mode: str) -> contextlib.AbstractContextManager[Any]:
    """Set, while this thread traces a step, how random numbers are drawn: `replica` or `row`."""
    return _mode.set(mode)


def replacements() -> Replacements:
    """Return what lets Keras's random functions know replicas and examples."""
    from keras.src.backend.tensorflow import image, random
    from keras.src.layers.regularization import spatial_dropout

    yield random, "_cast_seed", _folded
    for name in SHAPED:
        yield random, name, _by_row
    for name in WITH_PARAMETERS:
        yield random, name, functools.partial(_by_row, takes_scalars=True)
    for name in MIXING:
        yield random, name, functools.partial(_refused_by_row, what=f"keras.random.{name}")
    # The one draws besides Keras's functions, the other by Python, once for all steps and for each replica that is traced.
    for owner, name, layer in (
        (image, "elastic_transform", "RandomElasticTransform"),
        (getattr(keras.layers, "AugMix", None), "get_random_transformation", "AugMix"),
    ):
        if hasattr(owner, name):  # Keras 3.8 has neither layer
            yield owner, name, functools.partial(_refused_by_row, what=f"keras.layers.{layer}")
    yield random, "dropout", _dropout_by_row
    for kind in (spatial_dropout.SpatialDropout1D, spatial_dropout.SpatialDropout2D, spatial_dropout.SpatialDropout3D):
        yield kind, "_get_noise_shape", _with_open_rows


def _folded(cast_seed: Callable[..., Any], seed: Any) -> Any:
    share, seed = shares.current(), cast_seed(seed)
    if share is None or _mode.value != "replica" or share.num_replicas == 1:
        return seed
    return tf.random.experimental.stateless_fold_in(seed, share.replica)


def _rows_mode() -> Any:
    share = shares.current()
    if share is None or rows_are_keyed or share.num_replicas == 1:
        return None
    return share if _mode.value == "row" else None


def _by_row(original: Callable[..., Any], shape: Any, *args: Any, takes_scalars: bool = False, **kwargs: Any) -> Any:
    share = _rows_mode()
    if share is None or not _is_of_rows(share, shape):
        return original(shape, *args, **kwargs)
    parameters = [*args[:2], *(value for name, value in kwargs.items() if name not in ("seed", "dtype"))]
    are_scalars = (getattr(value, "shape", ()) == () and not isinstance(value, (list, tuple)) for value in parameters)
    if takes_scalars and not all(are_scalars):
        raise _not_of_a_row(f"keras.random.{original.__name__}", "Pass scalars as parameters")
    return _rows(share, shape, lambda whole: original(whole, *args, **kwargs))


def _refused_by_row(original: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
    if _rows_mode() is not None:
        raise _not_of_a_row(what, "Do it in a Pipeline's map")
    return original(*args, **kwargs)


def _not_of_a_row(name: str, instead: str) -> UsageError:
    return UsageError(
        "draws='row' needs random numbers that belong to one example",
        f"{instead}, or use draws='replica'.",
        drawn=name,
    )


def _is_of_rows(share: shares.Share, shape: Any) -> bool:
    """Return whether a draw of this shape has a value for each example; a known size must be the replica's batch size."""
    if isinstance(shape, tf.TensorShape):
        shape = shape.as_list()
    elif not isinstance(shape, (tuple, list)):
        static_shape = tf.get_static_value(shape)
        shape = [None] if static_shape is None else [int(size) for size in static_shape]
    if not shape or not isinstance(shape[0], (int, np.integer)):
        return bool(shape)
    rows = tf.get_static_value(share.rows)
    return rows is not None and int(rows) == shape[0]


def with_unknown_rows(mode: str, batch: Any, shares_of_batch: int) -> Any:
    """Hide a replica's batch size while a step is traced: otherwise a weight of the same size would look like examples.

    Args:
        mode: As for `drawing`. Only `row` needs it.
        batch: A structure of tensors, perhaps with None.
        shares_of_batch: Number of shares of the global batch.

    Returns:
        The structure.
    """
    if mode != "row" or shares_of_batch == 1 or tf.executing_eagerly():
        return batch

    def hidden(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.shape.rank:
            return value
        return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])

    return tf.nest.map_structure(hidden, batch)


def _dropout_by_row(original: Callable[..., Any], inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
    share = _rows_mode()
    if share is None or rate in (0.0, 1.0) or (noise_shape is not None and isinstance(noise_shape[0], int)):
        return original(inputs, rate, noise_shape, seed)
    shape = tf.shape(inputs)
    if noise_shape is not None:
        shape = tf.stack([shape[i] if n is None else n for i, n in enumerate(noise_shape)])
    kept = _rows(share, shape, lambda whole: original(tf.ones(whole, inputs.dtype), rate, None, seed))
    return inputs * kept


def _with_open_rows(original: Callable[..., Any], self: Any, inputs: Any) -> Any:
    """Draw a mask for each example: a known batch size could be taken for one mask for all examples."""
    shape = original(self, inputs)
    return shape if _rows_mode() is None else (None, *shape[1:])


def _rows(share: shares.Share, shape: Any, draw: Callable[[Any], Any]) -> Any:
    """Draw for the examples of all replicas, as one device does, and keep those of this replica."""
    shape = tf.convert_to_tensor(shape)
    each = shape[0] // tf.maximum(share.rows, 1)
    with unwatched():
        whole = draw(tf.concat([[tf.cast(share.total, tf.int32) * each], shape[1:]], axis=0))
    first = share.first * each
    return whole[first : first + shape[0]]
