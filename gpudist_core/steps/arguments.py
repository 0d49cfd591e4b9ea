"""Check the arguments of a training step, with one strategy or with parameter servers, when the step is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError, is_whole


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


def check_place(strategy: tf.distribute.Strategy, accumulate: int) -> None:
    """Refuse to call a step where it cannot train.

    Args:
        strategy: The step's strategy.
        accumulate: Number of batches that make one update.

    Raises:
        UsageError: In a tf.function with `accumulate`, inside Strategy.run, and in the scope of another strategy.
    """
    if accumulate > 1 and not tf.executing_eagerly():
        raise UsageError(
            "A step that accumulates must not be called in a tf.function, which would count the calls once, at tracing",
            "Leave the tf.function out. step.several(batches) trains several batches in one compiled call.",
            accumulate=accumulate,
        )
    if not tf.distribute.has_strategy():
        return
    if tf.distribute.get_replica_context() is not None:
        raise UsageError("A step must be called outside Strategy.run", "It calls run itself.", strategy=type(strategy).__name__)
    if tf.distribute.get_strategy() is not strategy:
        raise UsageError(
            "A step must be used with the strategy that its model was made in",
            "Leave the other strategy's scope, or make model, optimizer and step there.",
            strategy=type(tf.distribute.get_strategy()).__name__,
            model_strategy=type(strategy).__name__,
        )


def checked_parts(batch: Any, strategy: tf.distribute.Strategy, devices: int) -> tuple[Any, ...]:
    """Return a batch as the tuple of arguments for `Strategy.run`.

    Args:
        batch: The batch of a step: distributed, or on one device tensors and arrays.
        strategy: The step's strategy.
        devices: Number of its devices on this host.

    Returns:
        (x, y) or (x, y, weight).

    Raises:
        UsageError: If the batch is not valid, or not distributed over these devices.
    """

    def is_ours(part: Any) -> bool:
        return not isinstance(part, tf.distribute.DistributedValues) or len(part.values) == devices

    direct = tf.distribute.DistributedValues if devices > 1 else (tf.Tensor, tf.distribute.DistributedValues)
    is_one = isinstance(batch, (tuple, list)) and len(batch) in (2, 3)
    if is_one and all(isinstance(part, direct) and is_ours(part) for part in batch):
        return tuple(batch)  # nothing to look into: that alone would be felt in a small step
    batch = checked_batch(batch)
    parts = tf.nest.flatten(batch)
    if not all(map(is_ours, parts)):
        raise UsageError(
            "A batch must have one part for each replica of the step's strategy on this host",
            "Distribute it with the strategy that the model was made in.",
            parts=max(len(part.values) for part in parts if isinstance(part, tf.distribute.DistributedValues)),
            replicas=devices,
            strategy=type(strategy).__name__,
        )
    if all(isinstance(part, tf.distribute.DistributedValues) for part in parts):
        return tuple(batch)
    if devices > 1:
        raise UsageError(
            "A batch must hold one part for each replica",
            "Use Pipeline.distribute(strategy) or strategy.experimental_distribute_dataset.",
            batch=[type(part).__name__ for part in parts],
        )
    return tuple(tf.nest.map_structure(as_tensor, tuple(batch)))


def as_tensor(value: Any) -> Any:
    """Return a value as a tensor; ragged and sparse ones as they are."""
    return value if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(value)


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
