"""Handle metrics and logs of Keras 3 that count otherwise on several replicas: integers, functions of one number, variables.

Logs are means over the examples, and a count is none.

Keras counts a number that a metric's function returns for a batch, not for each example, once. A replica's number is treated as
the mean over its examples, as for a loss of one number. A root or a correlation over examples is no such mean, so the metric
then differs from one device.

Since Keras 3.10 each replica adds to a metric's variables for itself. Up to 3.9 they are mirrored: `assign_add` assigns the old
value plus the new one, and TensorFlow sums that over the replicas. So the old value counts once for each replica.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core import state


def warn_of_integers(name: str, value: Any) -> None:
    """Warn of integers and bools in the logs. Values computed from variables only are equal on all replicas and allowed.

    Args:
        name: The name of the log.
        value: The log's value from one replica's step.
    """
    share = shares.current()
    if share is None or share.num_replicas == 1 or isinstance(value, (tf.Variable, keras.Variable)):
        return
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating or is_of_variables(value):
        return
    warnings.warn(
        "A log of a step must be a mean over the examples: gpudist averages the logs of all replicas, weighted by examples. "
        f"Received: {name}, dtype={value.dtype.name!r}. It is treated as such a mean, so a count of examples becomes that of "
        "one replica. For a count over all replicas update a keras.metrics.Sum and return its result. Return a value that is "
        "equal "
        "on all replicas with tf.cast(value, tf.float32).",
        stacklevel=2,
    )


def is_of_variables(value: Any) -> bool:
    """Return whether a tensor of a graph is computed from variables and constants only."""
    if not tf.is_symbolic_tensor(value):
        return False
    waiting, kinds = [value.op], set()
    seen = {value.op.name}
    while waiting:
        operation = waiting.pop()
        inputs = () if operation.type == "ReadVariableOp" else operation.inputs
        if not inputs:
            kinds.add(operation.type)
        for tensor in inputs:
            if tensor.op.name not in seen:
                seen.add(tensor.op.name)
                waiting.append(tensor.op)
    return "ReadVariableOp" in kinds and kinds <= {"ReadVariableOp", "Const"}


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
    if not (_is_mean(metric._fn) or is_of_variables(tensor)):
        _warn_of_one_number(metric, tensor.shape)
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


def _warn_of_one_number(metric: Any, shape: Any) -> None:
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


def make_variables_local(strategy: tf.distribute.Strategy, metrics: Iterable[Any]) -> None:
    """Replace mirrored variables of metrics, which keep their values; to be called before a step is traced.

    Args:
        strategy: The strategy of the metrics.
        metrics: Keras metrics that are built.
    """
    if strategy.num_replicas_in_sync == 1 or hasattr(keras.Variable, "synchronization"):
        return
    for variable in (variable for metric in metrics for variable in metric.variables):
        mirrored = variable._value
        if mirrored.synchronization is tf.VariableSynchronization.ON_READ:
            continue
        value = tf.convert_to_tensor(mirrored)
        with strategy.scope():
            variable._value = tf.Variable(
                tf.zeros_like(value),
                trainable=False,
                name=variable.name,
                aggregation=mirrored.aggregation,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
        variable._value.assign(value)
