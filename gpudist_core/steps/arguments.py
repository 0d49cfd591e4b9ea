"""Check the arguments of a training step, with one strategy or with parameter servers, when the step is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.values import is_whole


def check_model(model: Any, variables: Any) -> None:
    """Refuse an object that cannot be a model.

    Args:
        model: The `model` argument.
        variables: The variables to train; None for the model's own.

    Raises:
        UsageError: If it is not callable, is a class, or has no trainable variables and `variables` is None.
    """
    if not callable(model) or isinstance(model, type) or (variables is None and not hasattr(model, "trainable_variables")):
        raise UsageError(
            "model must be a Keras model, or a callable with trainable_variables",
            "Pass an instance, or name the variables to train: variables=[...].",
            model=model,
        )


def check_accumulate(accumulate: Any) -> None:
    """Refuse a value that is not a number of batches.

    Args:
        accumulate: The `accumulate` argument.

    Raises:
        UsageError: If it is not an integer, or below 1.
    """
    if not is_whole(accumulate, 1):
        raise UsageError(
            "accumulate must be a positive integer",
            "1 means no accumulation.",
            accumulate=accumulate,
        )


def checked_pending(state: Any, accumulate: int, owner: str, sums: str) -> int:
    """Return the number of pending batches of a saved state.

    Args:
        state: The `state` argument of `restore`.
        accumulate: Number of batches that make one update.
        owner: The name of the class that saved the state and restores it.
        sums: The key of the sums in the state.

    Returns:
        A number below `accumulate`.

    Raises:
        UsageError: If the state comes from another class, or from another `accumulate`.
    """
    if not isinstance(state, Mapping) or not is_whole(state.get("pending"), 0):
        raise UsageError(f"state must be a result of {owner}.state()", state=state)
    pending, saved_with = int(state["pending"]), int(state.get("accumulate", accumulate))
    if pending and sums not in state:
        raise UsageError(
            f"Pending batches must be restored by what accumulated them: a {owner} by a {owner}",
            "Save after flush(), or restore it there.",
            pending=pending,
            state=sorted(state),
        )
    if pending >= accumulate or (pending and saved_with != accumulate):
        raise UsageError(
            f"The state must come from a {owner} with the same accumulate",
            "Restore it there.",
            pending=pending,
            accumulate=accumulate,
            accumulated_by=saved_with,
        )
    return pending


def checked_batch(batch: Any) -> tuple[Any, ...]:
    """Return a batch as (x, y) or (x, y, weight). The weight may be None.

    Args:
        batch: The batch of a step.

    Returns:
        (x, y) or (x, y, weight).

    Raises:
        UsageError: If the batch has another form, lacks a part, or has more than one tensor of weights.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        received = type(batch).__name__ if not isinstance(batch, (tuple, list)) else f"{len(batch)} parts"
        raise UsageError("A batch must be (x, y) or (x, y, weight)", "Put several inputs into one nested x.", batch=received)
    x, y, *weights = batch
    weight = weights[0] if weights else None
    missing = {name: None for name, part in (("x", x), ("y", y)) if any(leaf is None for leaf in tf.nest.flatten(part))}
    if missing:
        raise UsageError(
            "No part of a batch may be None, except the weight",
            "If the loss needs no targets, pass (x, x) and ignore the first argument of the loss.",
            **missing,
        )
    if isinstance(weight, (tuple, list, dict)):
        raise UsageError(
            "The weights of a batch must be one tensor of shape (rows,) or of the shape of the losses",
            "To weight several outputs, put the weights into y and multiply in the loss.",
            weight=type(weight).__name__,
        )
    return (x, y) if weight is None else (x, y, weight)


def checked_metrics(metrics: Any) -> list[Any]:
    """Return metrics that a step can update.

    Args:
        metrics: The `metrics` argument.

    Returns:
        The metrics.

    Raises:
        UsageError: If it is not a list of Keras metrics that take (y, y_pred, sample_weight).
    """
    kept = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    if not isinstance(metrics, (list, tuple)) or not all(map(_takes_predictions, kept)):
        raise UsageError(
            "metrics must be a list of Keras metrics that take (y, y_pred, sample_weight)",
            "Create them in the strategy's scope: metrics=[keras.metrics.SparseCategoricalAccuracy()].",
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
    """Return variables that a step can train.

    Args:
        variables: The `variables` argument.

    Returns:
        The variables, or None.

    Raises:
        UsageError: If it is not a list of variables.
    """
    if variables is None:
        return None
    kept = list(variables) if isinstance(variables, Iterable) and not hasattr(variables, "assign") else [variables]
    if hasattr(variables, "assign") or not all(hasattr(variable, "assign") and hasattr(variable, "dtype") for variable in kept):
        raise UsageError(
            "variables must be a list of variables",
            "Pass the variables to train: variables=model.trainable_variables.",
            variables=variables,
        )
    return kept
