"""What a step may be given, with one strategy or with parameter servers; looked at when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.values import is_whole


def check_model(model: Any, variables: Any) -> None:
    """Refuse what cannot be a model.

    Args:
        model: What was given.
        variables: What is to be trained, None for the model's own.

    Raises:
        WrongUse: It cannot be called, is a class, or nobody says what is trained.
    """
    if not callable(model) or isinstance(model, type) or (variables is None and not hasattr(model, "trainable_variables")):
        raise WrongUse(
            "A model is a Keras model, or a callable with trainable_variables",
            "Give one that was made, or say what is trained: variables=[...].",
            model=model,
        )


def check_accumulate(accumulate: Any) -> None:
    """Refuse what is no number of batches.

    Args:
        accumulate: What was given.

    Raises:
        WrongUse: It is no whole number, or below 1.
    """
    if not is_whole(accumulate, 1):
        raise WrongUse(
            "The number of batches that make one update must be a positive integer",
            "1 means no accumulation.",
            accumulate=accumulate,
        )


def checked_batch(batch: Any) -> tuple[Any, ...]:
    """A batch as a step takes it, which may have None in the place of weights.

    Args:
        batch: What was given.

    Returns:
        (x, y) or (x, y, weight).

    Raises:
        WrongUse: It is something else, lacks a part, or has more than one tensor of weights.
    """
    import tensorflow as tf

    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        received = type(batch).__name__ if not isinstance(batch, (tuple, list)) else f"{len(batch)} parts"
        raise WrongUse("A batch must be (x, y) or (x, y, weight)", "Put several inputs into one nested x.", batch=received)
    x, y, *weights = batch
    weight = weights[0] if weights else None
    missing = {name: None for name, part in (("x", x), ("y", y)) if any(leaf is None for leaf in tf.nest.flatten(part))}
    if missing:
        raise WrongUse(
            "Every part of a batch must be there",
            "Where the loss compares with nothing, give (x, x), and leave its first argument alone.",
            **missing,
        )
    if isinstance(weight, (tuple, list, dict)):
        raise WrongUse(
            "The weights of a batch are one tensor: (rows,), or of the shape of the losses",
            "Put those of several outputs into y, and multiply in the loss.",
            weight=type(weight).__name__,
        )
    return (x, y) if weight is None else (x, y, weight)


def checked_metrics(metrics: Any) -> list[Any]:
    """Metrics that a step can update.

    Args:
        metrics: What was given.

    Returns:
        The metrics.

    Raises:
        WrongUse: It is no list of Keras metrics that take (y, y_pred, sample_weight).
    """
    kept = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if not isinstance(metrics, (list, tuple)) or not all(map(_takes_predictions, kept)):
        raise WrongUse(
            "metrics must be a list of Keras metrics that take (y, y_pred, sample_weight)",
            "Make them in the strategy's scope: metrics=[keras.metrics.SparseCategoricalAccuracy()].",
            metrics=metrics,
        )
    return kept


def _takes_predictions(metric: Any) -> bool:
    update = getattr(metric, "update_state", None)
    if update is None or isinstance(metric, type):
        return False
    try:
        inspect.signature(update).bind(None, None, sample_weight=None)
    except TypeError:  # as keras.metrics.Mean, which takes values
        return False
    except ValueError:  # one that does not say what it takes
        pass
    return True


def checked_variables(variables: Any) -> list[Any] | None:
    """Variables that a step can train.

    Args:
        variables: What was given.

    Returns:
        The variables; None where none were given.

    Raises:
        WrongUse: It is no list of variables.
    """
    if variables is None:
        return None
    kept = list(variables) if isinstance(variables, Iterable) and not hasattr(variables, "assign") else [variables]
    if hasattr(variables, "assign") or not all(hasattr(one, "assign") and hasattr(one, "dtype") for one in kept):
        raise WrongUse(
            "variables is a list of variables",
            "Give those that are trained: variables=model.trainable_variables.",
            variables=variables,
        )
    return kept
