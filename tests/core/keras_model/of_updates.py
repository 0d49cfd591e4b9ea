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


def averaged(run: Run) -> dict[str, Any]:
    """Overwritten every fourth step, and by the callback at the end of each epoch."""
    import keras

    def optimizer() -> Any:
        return keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)

    x, y = digits(75)
    return run.fit(run.sequential(hidden, optimizer=optimizer), x, y)


def own_losses(run: Run) -> dict[str, Any]:
    """Of variables and activations, with moments that cross replicas between the two."""
    import keras

    def regularised() -> Any:
        return keras.layers.Dense(16, kernel_regularizer="l2", activity_regularizer="l2", kernel_constraint="max_norm")

    x, y = digits(76)
    return run.fit(run.sequential(regularised, keras.layers.BatchNormalization, hidden), x, y)


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
