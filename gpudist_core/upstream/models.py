"""Inspect and check a model and its optimizer before a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.upstream.runtime import flat_layers


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was made.

    Args:
        model: A Keras model or a callable with `variables`.

    Returns:
        The `tf.distribute.Strategy`; TensorFlow's default one outside of every scope.
    """
    kept = getattr(model, "_distribute_strategy", None)
    if kept is not None:
        return kept
    for variable in getattr(model, "variables", []):
        strategy = getattr(plain(variable), "distribute_strategy", None)
        if strategy is not None:
            return strategy
    return tf.distribute.get_strategy()


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuse a strategy whose workers this process cannot run together.

    Args:
        strategy: The step's strategy.

    Raises:
        UsageError: For a `ParameterServerStrategy`, under which this process alone would train.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise UsageError(
            "With parameter servers the coordinator must send the work to the workers",
            "Use gd.CoordinatedTraining.",
            strategy=type(strategy).__name__,
        )


def check_current(model: Any) -> None:
    """Refuse to train or use a model in the scope of a strategy that it was not made in.

    Args:
        model: A Keras model.

    Raises:
        UsageError: If it was made in another scope, or in none.
    """
    current, own = tf.distribute.get_strategy(), getattr(model, "_distribute_strategy", None)
    if tf.distribute.has_strategy() and current is not own:
        raise UsageError(
            "A model must be used with the strategy that it was made in",
            "Leave the other strategy's scope, or make the model there.",
            strategy=type(current).__name__,
            model_strategy=None if own is None else type(own).__name__,
        )


def check_scope(
    strategy: tf.distribute.Strategy,
    model: Any,
    optimizer: Any,
    metrics: Sequence[Any] = (),
    trained: Sequence[Any] | None = None,
) -> None:
    """Refuse objects made outside of the strategy's scope: their variables would be counted N times, or once on each host.

    Args:
        strategy: The step's strategy.
        model: The model.
        optimizer: The Keras optimizer.
        metrics: Keras metrics.
        trained: The trained variables, if they are not the model's own.

    Raises:
        UsageError: If one was made outside.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    # Training changes nothing of a layer that was adapted.
    adapted = {id(v) for layer in flat_layers(model) if hasattr(layer, "adapt") for v in layer.non_trainable_variables}
    owners = [("model", model), ("optimizer", optimizer), *(("metric", metric) for metric in metrics)]
    owned = [(name, list(getattr(owner, "variables", []))) for name, owner in owners]
    for name, variables in [*owned, ("variable that is trained", list(trained or []))]:
        for variable in variables:
            is_inside = getattr(plain(variable), "distribute_strategy", None) is strategy
            if not is_inside and id(variable) not in adapted:
                raise _outside(name, variable, strategy)


def _outside(name: str, variable: Any, strategy: tf.distribute.Strategy) -> UsageError:
    return UsageError(
        f"The {name} must be made in the scope of the step's strategy",
        "Make it under `with strategy.scope():`.",
        variable=variable.name,
        strategy=type(strategy).__name__,
    )


@contextlib.contextmanager
def beside_variables(strategy: tf.distribute.Strategy, model: Any) -> Iterator[None]:
    """Check, while an optimizer makes its variables, that the model's variables belong to its strategy.

    Args:
        strategy: The optimizer's strategy.
        model: The model.

    Raises:
        UsageError: If one does not.
    """
    try:
        yield
    except ValueError as error:
        others = [v for v in model.variables if getattr(plain(v), "_distribute_strategy", None) is not strategy]
        if "`colocate_vars_with` must only be passed" not in str(error) or not others:
            raise
        raise _outside("model", others[0], strategy) from error


def plain(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable."""
    import keras

    return variable.value if isinstance(variable, keras.Variable) else variable


def scaled_where_needed(model: Any, optimizer: Any) -> Any:
    """Return the optimizer, with a loss scale if the model computes in float16, as `compile` does.

    Args:
        model: A Keras model.
        optimizer: A Keras optimizer.

    Returns:
        The optimizer, or a `LossScaleOptimizer` around it.
    """
    import keras

    policy = getattr(model, "dtype_policy", None)
    scales = hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None)
    if getattr(policy, "compute_dtype", None) != "float16" or scales:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def call(model: Any, x: Any, *, training: bool = True) -> Any:
    """Return the model's output.

    Args:
        model: A Keras model, or a callable of x.
        x: The inputs.
        training: Whether the model is trained; passed if it takes that.

    Returns:
        The model's result.
    """
    return model(x, training=training) if getattr(model, "_call_has_training_arg", False) else model(x)


def build(model: Any, local_results: Callable[[Any], Any], x: Any) -> None:
    """Create a Keras model's variables, with the shapes of a batch.

    Args:
        model: A Keras model. Other callables create their own variables.
        local_results: A function that splits a distributed value.
        x: The batch's inputs, one part for each replica.
    """
    if getattr(model, "built", True):
        return
    one_row = tf.nest.map_structure(lambda v: tf.zeros([1, *local_results(v)[0].shape[1:]], local_results(v)[0].dtype), x)
    model(one_row)
