"""Steps of one's own that assign to variables which nobody trains; imported on hosts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

KINDS = ("mean", "reduced", "running", "gradients", "averages", "count")


def assigned(kind: str) -> tuple[list[float], list[str]]:
    """What each copy of the variable is after a fit, and what was warned of."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

        def call(self, x: Any) -> Any:
            if kind == "running":
                self.kept.assign(0.9 * self.kept + 0.1 * keras.ops.mean(x))
            return self.dense(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            variables = self.dense.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply(gradients, variables)
            context = tf.distribute.get_replica_context()
            value = {
                "mean": lambda: self.kept + loss,
                "reduced": lambda: self.kept + context.all_reduce("MEAN", loss),
                "gradients": lambda: self.kept + keras.ops.sum(gradients[0]),
                "averages": lambda: 0.9 * self.kept + 0.1 * keras.ops.sum(variables[0]),
                "count": lambda: self.kept + 1.0,
            }.get(kind)
            if value is not None:
                self.kept.assign(value())
            return {"loss": loss}

    strategy = gd.make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = gd.distributed(Model())
        model.compile(keras.optimizers.SGD(0.1))
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=1, shuffle=False, verbose=0)
    copies = strategy.experimental_local_results(model.kept.value)
    texts = [str(one.message) for one in caught if "must assign the same value to a variable" in str(one.message)]
    return [float(copy) for copy in copies], sorted(set(texts))
