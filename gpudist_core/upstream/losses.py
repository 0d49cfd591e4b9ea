"""Compute losses of Keras 3 as this replica's share of the global loss: the shares sum to the loss of one device.

Keras 3.15 takes the mean of each replica's own values and divides by the number of replicas (`losses.loss.reduce_values`). That
is right only if all replicas have equally many values. Here the sum of this replica's values is divided by the number of all
values. Losses that compare the examples of a batch, or are a ratio over all of them, are refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.gradients import all_reduce
from gpudist_core.upstream.patches import Replacements


def replacements() -> Replacements:
    """Return what lets Keras's losses know shares."""
    from keras.src.losses import loss

    yield loss, "reduce_weighted_values", _reducing
    yield loss, "scale_loss_for_distribution", _scaling
    yield loss, "unscale_loss_for_distribution", _unscaling


def _reducing(original: Callable[..., Any], values: Any, sample_weight: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    share = shares.current()
    if share is None:
        return original(values, sample_weight, mask, **kwargs)
    return _share_of_loss(share, values, sample_weight, mask, **kwargs)


def _scaling(original: Callable[..., Any], value: Any) -> Any:
    return value if shares.current() is not None else original(value)


def _unscaling(original: Callable[..., Any], value: Any) -> Any:
    share = shares.current()
    return original(value) if share is None else value * float(share.num_replicas)


def mask_of(value: Any) -> Any:
    """Return the mask that a Keras layer left on its output, or a loss on its values, or None."""
    from keras.src import backend

    return backend.get_keras_mask(value)


def masked(value: Any, mask: Any) -> Any:
    """Attach a mask for `mask_of` to a tensor. None attaches nothing."""
    from keras.src import backend

    if mask is not None:
        backend.set_keras_mask(value, mask)
    return value


def per_example_function(loss: Any) -> Any:
    """Return a function (y, y_pred) -> values by example for a Keras loss: an object, a name, or a function."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            raise UsageError(
                "The name of a loss must be one of Keras's", "See keras.losses for their names, or pass a function.", loss=loss
            ) from None
    if not callable(loss) or isinstance(loss, type):
        raise UsageError(
            "A loss must be a function (y, y_pred) -> losses by example, a keras.losses.Loss or its name", loss=loss
        )
    if isinstance(loss, keras.losses.Loss):
        _check_no_sum(loss)
        return _called_alone(loss)
    _check_takes_two(loss)
    return loss


def of_function(loss: Any) -> Any:
    """Return the `keras.losses.Loss` that `compile` makes of a function: it gives targets and outputs the same rank."""
    from keras.src.losses.losses import LossFunctionWrapper

    return loss if isinstance(loss, keras.losses.Loss) else LossFunctionWrapper(loss)


def _check_no_sum(loss: Any) -> None:
    if loss.reduction == "sum":
        raise UsageError(
            "A loss must not use reduction='sum': a step computes the mean over the examples of all replicas",
            "Leave reduction out. If you need the sum, pass a function (y, y_pred) that returns the examples' losses times the "
            "global batch size.",
            loss=loss.name,
            reduction=loss.reduction,
        )


def _check_takes_two(loss: Any) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # one that does not say
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise UsageError(
            "A loss must take (y, y_pred): the targets and the model's output",
            "The step calls the model itself. The loss returns a value for each example.",
            loss=f"{getattr(loss, '__name__', type(loss).__name__)}{signature}",
        ) from None


def _called_alone(loss: Any) -> Any:
    """Return the values of a `keras.losses.Loss` without its reduction, as its `__call__` passes them: in the loss's dtype."""
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss

    def values(y: Any, y_pred: Any) -> Any:
        y, y_pred = (
            keras.tree.map_structure(lambda value: keras.ops.convert_to_tensor(value, dtype=loss.dtype), given)
            for given in (y, y_pred)
        )
        return loss.call(y, y_pred)

    return values


def _share_of_loss(
    share: shares.Share, values: Any, weights: Any, mask: Any, reduction: str | None = "sum_over_batch_size", dtype: Any = None
) -> Any:
    from keras.src.losses.loss import standardize_reduction

    reduction = standardize_reduction(reduction)
    values = tf.convert_to_tensor(values) if dtype is None else tf.cast(values, dtype)
    if values.shape.rank == 0:
        # One number counts as the mean over this replica's examples.
        warn_of_one_number(share)
        return values * tf.cast(share.fraction, values.dtype)
    mask = None if mask is None else tf.cast(mask, values.dtype)
    values, weighted = _weigh(values, mask, None if weights is None else tf.cast(weights, values.dtype))
    if reduction in (None, "none"):
        return values
    total = tf.reduce_sum(values)
    if reduction == "sum":
        return total
    by_weight = reduction == "mean_with_sample_weight" and weighted is not None
    count = tf.reduce_sum(weighted) if by_weight else _count(values, mask)
    return tf.math.divide_no_nan(total, all_reduce(tf.stop_gradient(tf.cast(count, values.dtype))))


def warn_of_one_number(share: shares.Share) -> None:
    """Warn that a loss of one number is treated as a mean, if that matters: sums, maxima and roots give another result."""
    if share.num_replicas > 1:
        warnings.warn(
            "A loss must return one value for each example, so that examples can be counted over all replicas. Received: "
            "shape=(). It is treated as the mean over the replica's examples. A sum, a maximum or a root trains another model "
            "than on one device. Return the values.",
            stacklevel=2,
        )


def _weigh(values: Any, mask: Any, weights: Any) -> tuple[Any, Any]:
    """Return the values times weights and mask, and the product of weights and mask (None without both)."""
    from keras.src.losses.loss import squeeze_or_expand_to_same_rank

    together = weights
    if mask is not None:
        if weights is None:
            together = mask
        else:
            mask, weights = squeeze_or_expand_to_same_rank(mask, weights)
            together = mask * weights
    if together is None:
        return values, None
    values, together = squeeze_or_expand_to_same_rank(values, together)
    return values * together, together


def _count(values: Any, mask: Any) -> Any:
    """Return the number of values; with a mask, the number that it keeps."""
    if mask is None:
        return tf.size(values)
    trailing = tf.reduce_prod(tf.shape(values)[mask.shape.rank :])
    return tf.reduce_sum(mask) * tf.cast(trailing, mask.dtype)


GATHERED = (
    "In a custom loss compare them with those of all replicas: apply keras.losses.circle to "
    "tf.distribute.get_replica_context().all_gather(..., axis=0) of y and y_pred, and keep the values of the "
    "replica's own examples. The context is None while Keras builds the model."
)


def check_rows(loss: Any) -> None:
    """Refuse a Keras loss that compares examples, or is a ratio over all: it depends on each replica's examples.

    Args:
        loss: A `keras.losses.Loss`, a name, or a function.

    Raises:
        UsageError: For `Dice` and `Tversky` without axes, `CosineSimilarity` and crossentropies along the examples, `Circle`.
    """
    loss = keras.losses.get(loss) if isinstance(loss, str) else loss
    function, options = _function_of(loss)
    if function is keras.losses.circle:
        rule, advice = "An example's loss must not depend on the other examples of its replica", GATHERED
    elif _joins_rows(function, options):
        rule = "A loss must have a value for each example, so that it does not depend on the other examples of its replica"
        of_images = ": keras.losses.Dice(axis=(1, 2, 3)) for images" if function in _ratios() else ""
        advice = f"Leave the first axis out of its axes{of_images}."
    else:
        return
    raise UsageError(rule, advice, loss=getattr(loss, "name", None) or getattr(loss, "__name__", ""))


def _function_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function that a Keras loss calls, and its options. A loss with its own `call` is its own function."""
    from keras.src.losses.losses import LossFunctionWrapper

    calls = getattr(type(loss), "call", None) is LossFunctionWrapper.call
    return (loss.fn, loss._fn_kwargs) if calls else (loss, {})


def _joins_rows(function: Any, options: dict[str, Any]) -> bool:
    """Return whether a Keras function combines several examples, other than by a mean."""
    from keras import losses as of_keras

    axis = options.get("axis")
    if function in _ratios():
        return axis is None or 0 in (axis if isinstance(axis, (list, tuple)) else [axis])
    crossentropies = of_keras.categorical_crossentropy, of_keras.sparse_categorical_crossentropy
    normed = (*crossentropies, of_keras.categorical_focal_crossentropy, of_keras.cosine_similarity)
    return axis == 0 and function in normed


def _ratios() -> tuple[Any, ...]:
    return keras.losses.dice, keras.losses.tversky
