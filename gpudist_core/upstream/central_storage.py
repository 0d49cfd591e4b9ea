"""Support variables under CentralStorageStrategy, where one variable serves all replicas.

TensorFlow 2.21 aggregates the replicas' assignments to such a variable (`AggregatingVariable`). Keras 3.15 expects a variable
for each replica. Metrics count with `total.assign(total + mine)`, which becomes N times the old total. BatchNormalization and
Nadam assign without an aggregation, which TensorFlow refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gpudist_core.upstream import optimizers
from gpudist_core.upstream.models import plain

_LOSS_SCALE = ("step_counter", "dynamic_scale")


def is_central(strategy: Any) -> bool:
    """Return whether a strategy keeps one variable for several replicas."""
    return "CentralStorage" in type(strategy).__name__ and strategy.num_replicas_in_sync > 1


def is_shared(variable: Any) -> bool:
    """Return whether all replicas read one variable, which holds what all of them have added.

    Args:
        variable: A Keras or TensorFlow variable.

    Returns:
        True under CentralStorageStrategy with several replicas.
    """
    return type(plain(variable)).__name__ == "AggregatingVariable"


def add_up(variables: Iterable[Any]) -> None:
    """Let the replicas' assignments to these variables be added up. Other variables are left as they are.

    Args:
        variables: Variables of metrics, Keras's or TensorFlow's.
    """
    for variable in map(plain, variables):
        sums = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
        if is_shared(variable) and sums and "assign" not in vars(variable):
            variable.assign = _adding(variable, variable.assign)


def prepare(*owners: Any) -> None:
    """Let all replicas assign to variables without an aggregation: the value of the first replica counts.

    Args:
        *owners: A model and its optimizers. Their values are equal on all replicas.
    """
    for owner in owners:
        variables = optimizers.variables_of(owner) if hasattr(owner, "learning_rate") else getattr(owner, "variables", [])
        for variable in variables:
            let_first_assign(variable)
        for variable in (plain(getattr(owner, name)) for name in _LOSS_SCALE if getattr(owner, name, None) is not None):
            if is_shared(variable) and "assign" not in vars(variable):
                variable.assign = _by_first_alone(variable, variable.assign)


def let_first_assign(variable: Any) -> None:
    """Let the first replica's value count in assignments to a variable without an aggregation.

    Args:
        variable: A Keras or TensorFlow variable of any strategy.
    """
    variable = plain(variable)
    if is_shared(variable) and variable.aggregation == tf.VariableAggregation.NONE:
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def _by_first_alone(variable: Any, original: Any) -> Any:
    """Assign the first replica's value: LossScaleOptimizer assigns inside a `cond`, where collectives do not work."""

    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return original(value, *args, **kwargs)
        is_first = tf.distribute.get_replica_context()._replica_id_in_sync_group == 0
        return variable._v.assign(value, *args, **kwargs) if is_first else variable.read_value()

    return assign


def _adding(variable: Any, original: Any) -> Any:
    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return original(value, *args, **kwargs)
        return variable.assign_add(tf.cast(value, variable.dtype) - variable.read_value(), *args, **kwargs)

    return assign
