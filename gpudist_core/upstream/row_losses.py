"""Refuse losses of Keras 3 that compare the examples of a batch, or are a ratio over all of them."""

from __future__ import annotations

from typing import Any

import keras

from gpudist_core.errors import UsageError

GATHERED = (
    "In a custom loss compare them with those of all replicas: apply keras.losses.circle to "
    "tf.distribute.get_replica_context().all_gather(..., axis=0) of y and y_pred, and keep the values of the "
    "replica's own examples. The context is None while Keras builds the model."
)


def check(loss: Any) -> None:
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
