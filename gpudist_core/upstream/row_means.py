"""Treat the scalars that one replica computes as what they are on one device: means over examples.

Inside `counting`, every scalar that a replica computes is a mean over its examples: a Keras loss, a `reduce_mean`, a
regularizer. Weighted by the replica's fraction of the examples, such means sum to the mean over the global batch. So gradients
are taken of the mean times the fraction, and metrics use the fraction as weight (`Mean.update_state` of Keras 3.15 counts a
scalar once for each replica).

Logs are such means, and a count is none: integers are warned of.

Keras counts a number that a metric's function returns for a batch, not for each example, once. A replica's number is treated as
the mean over its examples, as for a loss of one number. A root or a correlation over examples is no such mean, so the metric
then differs from one device.

Since Keras 3.10 each replica adds to a metric's variables for itself. Up to 3.9 they are mirrored: `assign_add` assigns the old
value plus the new one, and TensorFlow sums that over the replicas. So the old value counts once for each replica.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.state import PerThread, warned_metrics
from gpudist_core.upstream import custom_step, losses
from gpudist_core.upstream.patches import Replacements

_means: PerThread[_Means | None] = PerThread(None)


@contextlib.contextmanager
def counting(*, tapes: bool) -> Iterator[None]:
    """Treat scalars as means over the replica's examples while this thread traces one replica's step.

    Args:
        tapes: Whether the step is a custom one, whose tapes give the gradients of the mean over all replicas' examples.
    """
    with _means.set(_Means()), custom_step.tracing() if tapes else contextlib.nullcontext():
        yield


class _Means:
    """Hold what is known of the scalars of one trace."""

    def __init__(self) -> None:
        self.of_rows: dict[int, Any] = {}
        self.outputs: Any = None  # of which a metric's function makes its values just now


def _current() -> tuple[_Means, shares.Share] | None:
    means, share = _means.value, shares.current()
    return None if means is None or share is None else (means, share)


def replacements() -> Replacements:
    """Return what lets losses and metrics know shares inside of `counting`."""
    from keras.src.losses import loss
    from keras.src.metrics.reduction_metrics import Mean, MeanMetricWrapper

    yield loss, "reduce_weighted_values", _reducing
    yield loss, "unscale_loss_for_distribution", _unscaling
    yield Mean, "update_state", _counting_rows
    yield MeanMetricWrapper, "update_state", _naming_outputs


def _reducing(of_share: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
    current = _current()
    if current is None:
        return of_share(values, *args, **kwargs)
    if getattr(values, "shape", None) is not None and values.shape.rank == 0:
        return _weighted_scalar(current[1], values, *args, **kwargs)
    value = of_share(values, *args, **kwargs)
    return value if value.shape.rank != 0 else tf.math.divide_no_nan(value, tf.cast(current[1].fraction, value.dtype))


def _unscaling(unscaled: Callable[..., Any], value: Any) -> Any:
    current = _current()
    if current is None:
        return unscaled(value)
    # What is unscaled goes to a metric of Keras's own, with a static number of rows or none: it is counted by its rows.
    current[0].of_rows[id(value)] = value
    return value


def _weighted_scalar(share: shares.Share, value: Any, sample_weight: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """Weigh a loss that is one number for all examples: it is their mean."""
    losses.warn_of_one_number(share)
    given = {name: w for name, w in (("sample_weight", sample_weight), ("mask", mask)) if w is not None}
    if given and share.num_replicas > 1:
        raise UsageError(
            "A loss must return one value for each example if examples have weights or a mask",
            "Remove the mean from the loss.",
            shape=(),
            **{f"{name}_shape": tuple(weight.shape) for name, weight in given.items()},
        )
    for weight in given.values():
        value *= tf.reduce_mean(tf.cast(weight, value.dtype))
    return value


def present(value: Any) -> Any:
    """Return a replica's scalar, or 0 without examples (a mean over no examples is NaN)."""
    share = shares.current()
    if share is None or share.num_replicas == 1:
        return value
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(tf.minimum(share.rows, 1), value.dtype)) if value.dtype.is_floating else value


def of_all(value: Any) -> Any:
    """Return a replica's part of the mean over all examples. The parts of all replicas sum to it."""
    return value if tf.convert_to_tensor(value).shape.rank else of_log(value)


def of_log(value: Any) -> Any:
    """Return the part as `of_all` does for a log of a step, in which arrays hold means over the examples, too."""
    share = shares.current()
    if share is None or share.num_replicas == 1:
        return value
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.float64)
    return tf.math.multiply_no_nan(value, tf.cast(share.fraction, value.dtype))


def _counting_rows(original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None) -> Any:
    current = _current()
    if current is not None and current[0].outputs is not None:
        values = by_row(self, values, current[0].outputs)
    if current is None or tf.convert_to_tensor(values).shape.rank != 0:
        return original(self, values, sample_weight)
    means, share = current
    if id(values) in means.of_rows:
        sample_weight = share.rows
    elif sample_weight is None:
        sample_weight = share.fraction
    return original(self, present(values), sample_weight)


def _naming_outputs(of_function: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    current = _current()
    if current is None or current[1].num_replicas == 1:
        return of_function(self, y_true, y_pred, sample_weight)
    current[0].outputs = y_pred
    try:
        return of_function(self, y_true, y_pred, sample_weight)
    finally:
        current[0].outputs = None


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
        "equal on all replicas with tf.cast(value, tf.float32).",
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
    if metric in warned_metrics:
        return
    warned_metrics.add(metric)
    warnings.warn(
        "A metric's function must return one value for each example, so that examples can be counted over all replicas. "
        f"Received: metric={metric.name!r}, shape={tuple(shape)}. It is treated as the mean over the replica's examples. A "
        "root or a correlation over examples then differs from one device. Return the values, or pass a keras.metrics.Metric "
        "that adds up what it needs and computes the number in result(), as keras.metrics.RootMeanSquaredError does.",
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
