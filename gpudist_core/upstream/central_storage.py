"""Support variables under CentralStorageStrategy, where one variable serves all replicas.

TensorFlow 2.21 aggregates the replicas' assignments to such a variable (`AggregatingVariable`). Keras 3.15 expects a variable
for each replica. Metrics count with `total.assign(total + mine)`, which becomes N times the old total. BatchNormalization,
Nadam and LossScaleOptimizer assign without an aggregation, which TensorFlow refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.upstream.models import plain
from gpudist_core.upstream.patches import Replacements


def is_central(strategy: tf.distribute.Strategy) -> bool:
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


def replacements() -> Replacements:
    """Return what lets the replicas of a step assign to a variable that they share."""
    from keras.src import backend
    from tensorflow.python.distribute.ps_values import AggregatingVariable

    yield backend.Variable, "_direct_assign", _adding
    for name in ("assign", "assign_add", "assign_sub"):
        yield AggregatingVariable, name, _of_first_replica


def _is_of_replica(variable: Any, aggregation: tf.VariableAggregation) -> bool:
    """Return whether a replica assigns to a shared variable with this aggregation."""
    is_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return is_replica and is_shared(variable) and plain(variable).aggregation == aggregation


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let what the replicas assign to a variable of a metric be added up."""

    @functools.wraps(original)
    def direct_assign(self: Any, value: Any) -> Any:
        if shares.current() is None or not _is_of_replica(self, tf.VariableAggregation.SUM):
            return original(self, value)
        kept = plain(self)
        return kept.assign_add(tf.cast(value, kept.dtype) - kept.read_value())

    return direct_assign


def _of_first_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first replica's value count if a variable has no aggregation. The values are equal on all replicas.

    LossScaleOptimizer updates in further threads, in which no share is set. So this depends on the variable alone. The original
    only raises there: no program that works without gpudist_core changes.
    """

    @functools.wraps(original)
    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_of_replica(self, tf.VariableAggregation.NONE):
            return original(self, value, *args, **kwargs)

        def update(kept: Any, value: Any) -> Any:
            return getattr(kept, original.__name__)(value, *args, **kwargs)

        def of_first(strategy: tf.distribute.Strategy, values: Any) -> Any:
            return strategy.extended.update(self, update, args=(strategy.experimental_local_results(values)[0],))

        context = tf.distribute.get_replica_context()
        try:  # all replicas have read the variable before it changes
            return context.merge_call(of_first, args=(value,))
        except RuntimeError as error:
            if "called while defining a new graph" not in str(error):
                raise
        # LossScaleOptimizer assigns its own variables in a `cond`, where replicas cannot wait for each other. The public
        # `replica_id_in_sync_group` is a tensor there (TensorFlow 2.21).
        return update(self.get(), value) if context._replica_id_in_sync_group == 0 else self.read_value()

    return assign
