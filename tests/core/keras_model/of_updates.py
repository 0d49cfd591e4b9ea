"""Trainings with something between the gradient and the weights, or within a layer, that could see one replica alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, digits, hidden


def clipped(run: Run) -> dict[str, Any]:
    import keras

    x, y = digits(75)
    kinds = [{"clipnorm": 0.05}, {"clipvalue": 0.005}, {"global_clipnorm": 0.1}]
    each = [
        run.fit(run.sequential(optimizer=lambda kind=kind: keras.optimizers.SGD(0.5, **kind)), x, y, epochs=1) for kind in kinds
    ]
    return {"each": each}


def accumulated(run: Run) -> dict[str, Any]:
    """With clipping, a schedule of the learning rate, and averages that overwrite."""
    import keras

    def optimizer() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
        averaged = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        return keras.optimizers.Adam(rate, gradient_accumulation_steps=3, global_clipnorm=0.05, **averaged)

    x, y = digits(100)
    model = run.sequential(hidden, optimizer=optimizer)
    return {**run.fit(model, x, y), "iterations": int(model.optimizer.iterations)}


def accumulated_by_own_steps(run: Run) -> dict[str, Any]:
    """Applied several times in a step, and in some of the steps alone: every third application makes an update."""
    import keras
    import tensorflow as tf

    class Often(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            for _ in range(self.times()):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0], training=True))
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return self.compute_metrics(data[0], data[1], self(data[0]))

        def times(self) -> int:
            return 2

    class Sometimes(Often):
        replicas = 1 if run.where is None else len(run.where.extended.worker_devices)
        calls = 0

        def times(self) -> int:
            self.calls += 1  # by every replica
            return (1, 0, 4)[(self.calls - 1) // self.replicas % 3]

    x, y = digits(100)
    found: dict[str, Any] = {}
    for kind, options in ((Often, {}), (Sometimes, {"run_eagerly": True})):

        def optimizer() -> Any:
            return keras.optimizers.Adam(0.05, gradient_accumulation_steps=3, global_clipnorm=0.5)

        model = run.sequential(hidden, kind=kind, optimizer=optimizer, **options)
        seen = run.fit(model, x, y)
        found[kind.__name__] = {**seen, "iterations": int(model.optimizer.iterations.numpy())}
    return found


def averaged(run: Run) -> dict[str, Any]:
    """Overwritten every fourth step, and by the callback at the end of each epoch."""
    import keras

    def optimizer() -> Any:
        return keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)

    x, y = digits(75)
    return run.fit(run.sequential(hidden, optimizer=optimizer), x, y)


def own_losses(run: Run) -> dict[str, Any]:
    """Of variables, activations and rows, with moments that cross replicas between them."""
    import keras

    class Short(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.001 * keras.ops.sum(keras.ops.square(x), axis=-1))
            return x

    def regularised() -> Any:
        return keras.layers.Dense(16, kernel_regularizer="l2", activity_regularizer="l2", kernel_constraint="max_norm")

    x, y = digits(76)
    return run.fit(run.sequential(regularised, Short, keras.layers.BatchNormalization, hidden), x, y)


def drawn_by_row(run: Run) -> dict[str, Any]:
    """Masks and noise that belong to a row are those of one device."""
    import keras

    layers = [hidden, lambda: keras.layers.Dropout(0.5, seed=1), lambda: keras.layers.GaussianNoise(0.3, seed=2)]
    x, y = digits(76)
    return run.fit(run.sequential(*layers, options={"draws": "row"}), x, y)


def half_precision(run: Run) -> dict[str, Any]:
    """A row whose gradient is beyond float16 is on one replica: all skip its batch and have one loss scale."""
    seen = _half_precision(run)
    assert seen["made"] == 4
    return seen


def half_precision_accumulated(run: Run) -> dict[str, Any]:
    """The batch that is skipped is none of those that make an update."""
    seen = _half_precision(run, gradient_accumulation_steps=3)
    assert seen["made"] == 1
    return seen


def _half_precision(run: Run, **options: Any) -> dict[str, Any]:
    import keras

    def optimizer() -> Any:
        inner = keras.optimizers.SGD(0.1, **options)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=4)

    x, y = digits(75)
    weights = np.ones(75, "float32")
    weights[30] = 1e7
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = run.sequential(hidden, optimizer=optimizer)
        seen = run.fit(model, x, y, sample_weight=weights)
    finally:
        keras.config.set_dtype_policy("float32")
    made = int(model.optimizer.inner_optimizer.iterations.numpy())
    return {**seen, "made": made, "scale": float(model.optimizer.dynamic_scale.numpy())}
