"""What metrics count under CentralStorageStrategy, where one variable counts the rows of all replicas.

Keras 3 counts by `total.assign(total + mine)`. Where each replica has a variable of its own that is right. A variable in one
place takes the sum over the replicas of what is assigned, so N times what it had: `fit` logs it wrong (Keras 3.15, TF 2.21).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gpudist_core.upstream.models import plain


def add_up(variables: Iterable[Any]) -> None:
    """From now on what replicas assign to these variables is what they add to them; others are left as they are.

    Args:
        variables: Variables of metrics, Keras's or TensorFlow's.
    """
    for variable in map(plain, variables):
        sums = getattr(variable, "aggregation", None) == tf.VariableAggregation.SUM
        if type(variable).__name__ == "AggregatingVariable" and sums and "assign" not in vars(variable):
            variable.assign = _adding(variable, variable.assign)


def _adding(variable: Any, original: Any) -> Any:
    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return original(value, *args, **kwargs)
        return variable.assign_add(tf.cast(value, variable.dtype) - variable.read_value(), *args, **kwargs)

    return assign
