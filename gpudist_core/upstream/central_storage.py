"""Variables under CentralStorageStrategy, where one stands for those of all replicas.

TensorFlow 2.21 aggregates what replicas assign to such a variable, as `AggregatingVariable` says; Keras 3.15 was written for
strategies that give each replica a variable of its own. Metrics count by `total.assign(total + mine)`, which becomes N
times what there was; BatchNormalization and Nadam assign without saying how to aggregate, which TensorFlow refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gpudist_core.upstream.models import plain


def is_shared(variable: Any) -> bool:
    """Whether replicas that read this variable all read one, which has what all of them have added.

    Args:
        variable: A variable, Keras's or TensorFlow's.

    Returns:
        True under CentralStorageStrategy with several replicas.
    """
    return type(plain(variable)).__name__ == "AggregatingVariable"


def add_up(variables: Iterable[Any]) -> None:
    """From now on what replicas assign to these variables is what they add to them; others are left as they are.

    Args:
        variables: Variables of metrics, Keras's or TensorFlow's.
    """
    for variable in map(plain, variables):
        sums = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
        if is_shared(variable) and sums and "assign" not in vars(variable):
            variable.assign = _adding(variable, variable.assign)


def take_first(variables: Iterable[Any]) -> None:
    """From now on these variables take what the first replica assigns, unless they say how to aggregate; others are left alone.

    Args:
        variables: Variables of a model or an optimizer to which all replicas assign the same.
    """
    for variable in map(plain, variables):
        if is_shared(variable) and variable.aggregation == tf.VariableAggregation.NONE:
            variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def _adding(variable: Any, original: Any) -> Any:
    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return original(value, *args, **kwargs)
        return variable.assign_add(tf.cast(value, variable.dtype) - variable.read_value(), *args, **kwargs)

    return assign
