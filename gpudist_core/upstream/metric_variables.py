"""Variables of metrics that each replica adds to for itself, as Keras has them since 3.10.

Up to Keras 3.9 they are mirrored: `assign_add` assigns the old value plus the new one, and TensorFlow sums that over the
replicas. So the old value counts once for each replica.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf


def make_local(strategy: tf.distribute.Strategy, metrics: Iterable[Any]) -> None:
    """Replace mirrored variables of metrics, which keep their values; to be called before a step is traced.

    Args:
        strategy: The strategy of the metrics.
        metrics: Keras metrics that are built.
    """
    if strategy.num_replicas_in_sync == 1 or hasattr(keras.Variable, "synchronization"):
        return
    for variable in (variable for metric in metrics for variable in metric.variables):
        mirrored = variable._value
        if mirrored.synchronization is tf.VariableSynchronization.ON_READ:
            continue
        value = tf.convert_to_tensor(mirrored)
        with strategy.scope():
            variable._value = tf.Variable(
                tf.zeros_like(value),
                trainable=False,
                name=variable.name,
                aggregation=mirrored.aggregation,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
        variable._value.assign(value)
