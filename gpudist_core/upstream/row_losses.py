"""Losses of Keras 3 that are no losses of rows: those that compare the rows of a batch, or are a ratio over all of them."""

from __future__ import annotations

from typing import Any

from gpudist_core.errors import WrongUse

GATHERED = (
    "In a loss of your own compare them with those of all replicas: keras.losses.circle of what "
    "tf.distribute.get_replica_context().all_gather(..., axis=0) gives of y and y_pred, and of its values those of the "
    "replica's own rows. The context is None while Keras builds the model."
)


def check(loss: Any) -> None:
    """Refuse a loss of Keras that compares rows, or is a ratio over all: of each replica's rows it is another.

    Args:
        loss: A `keras.losses.Loss`, a name, or a function.

    Raises:
        WrongUse: For `Dice` and `Tversky` without axes, `CosineSimilarity` and crossentropies along the rows, `Circle`.
    """
    import keras

    loss = keras.losses.get(loss) if isinstance(loss, str) else loss
    function, options = _function_of(loss)
    if function is keras.losses.circle:
        rule, advice = "A row's loss must not depend on which other rows a replica has", GATHERED
    elif _joins_rows(function, options):
        rule = "A loss has a value for each row, so that it does not depend on which rows a replica has"
        of_images = ": keras.losses.Dice(axis=(1, 2, 3)) for images" if function in _ratios() else ""
        advice = f"Leave the rows out of its axes{of_images}."
    else:
        return
    raise WrongUse(rule, advice, loss=getattr(loss, "name", None) or getattr(loss, "__name__", ""))


def _function_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss of Keras calls, and its options; a loss that has a `call` of its own is its own function."""
    from keras.src.losses.losses import LossFunctionWrapper

    calls = getattr(type(loss), "call", None) is LossFunctionWrapper.call
    return (loss.fn, loss._fn_kwargs) if calls else (loss, {})


def _joins_rows(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function of Keras makes one value of several rows, or weighs one by another; a mean over them does no harm."""
    from keras import losses as of_keras

    axis = options.get("axis")
    if function in _ratios():
        return axis is None or 0 in (axis if isinstance(axis, (list, tuple)) else [axis])
    crossentropies = of_keras.categorical_crossentropy, of_keras.sparse_categorical_crossentropy
    normed = (*crossentropies, of_keras.categorical_focal_crossentropy, of_keras.cosine_similarity)
    return axis == 0 and function in normed


def _ratios() -> tuple[Any, ...]:
    import keras

    return keras.losses.dice, keras.losses.tversky
