"""Handle metrics that Keras 3 makes of a function that returns one number for a batch, not a value for each example.

Keras counts such a number once for a batch. A replica's number is treated as the mean over its examples, as for a loss of one
number. A root or a correlation over examples is no such mean, so the metric then differs from one device.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import state
from gpudist_core.upstream import whole_numbers

# Of outputs without columns Keras's other functions take the mean over the rows.
COMPARING = (
    "categorical_hinge",
    "concordance_correlation",
    "cosine_similarity",
    "dice",
    "kl_divergence",
    "pearson_correlation",
    "tversky",
)


def by_row(metric: Any, values: Any, outputs: Any) -> Any:
    """Return the values of a metric's function, or their mean with a warning if they are one number for the batch.

    Args:
        metric: A `MeanMetricWrapper`.
        values: The function's result on one replica.
        outputs: The model's outputs, its argument.

    Returns:
        The same values if they are by example, as far as shapes tell; otherwise their mean.
    """
    tensor = tf.convert_to_tensor(values)
    if _has_rows(tensor, outputs):
        return values
    if not (_is_mean(metric._fn) or whole_numbers.is_of_variables(tensor)):
        _warn(metric, tensor.shape)
    return values if tensor.shape.rank == 0 else tf.reduce_mean(tensor)


def _has_rows(values: Any, outputs: Any) -> bool:
    """Return whether there may be a value for each example: a known number of values with an unknown batch size says no."""
    if not values.shape.rank or values.shape[0] is None:
        return bool(values.shape.rank != 0)
    shapes = [output.shape for output in tf.nest.flatten(outputs) if getattr(getattr(output, "shape", None), "rank", None)]
    if not shapes:
        return True
    return any(shape[0] is not None and values.shape[0] % max(shape[0], 1) == 0 for shape in shapes)


def _is_mean(function: Any) -> bool:
    """Return whether a function's number is known to be the mean over the examples, as for most of Keras's functions."""
    if isinstance(function, keras.losses.Loss):
        return True
    return str(getattr(function, "__module__", "")).startswith("keras.") and function.__name__ not in COMPARING


def _warn(metric: Any, shape: Any) -> None:
    if metric in state.warned_metrics:
        return
    state.warned_metrics.add(metric)
    warnings.warn(
        "A metric's function must return one value for each example, so that examples can be counted over all replicas. "
        "Received: "
        f"metric={metric.name!r}, shape={tuple(shape)}. It is treated as the mean over the replica's examples. A root or a "
        "correlation over examples then differs from one device. Return the values, or pass a "
        "keras.metrics.Metric that adds up what it needs and computes the number in result(), as "
        "keras.metrics.RootMeanSquaredError does.",
        stacklevel=2,
    )
