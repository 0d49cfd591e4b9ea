"""Metrics that are functions: what they are after an epoch on this process's topology, and what was warned of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, strategy


def counted(*, alone: bool) -> tuple[dict[str, Any], list[str]]:
    """The results of an evaluation, of an epoch of training and of steps of a `TrainStep`, and the warnings."""
    import keras
    from keras import ops

    import gpudist_core as gd

    run = Run(None if alone else strategy())

    def rmse(y: Any, y_pred: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y - y_pred)))

    def mean(y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y - y_pred), axis=-1)

    def rate(y: Any, y_pred: Any) -> Any:
        return model.optimizer.learning_rate

    def of_words(y: Any, y_pred: Any) -> Any:
        return ops.reshape(ops.abs(y - y_pred), (-1,))

    x = np.random.default_rng(1).normal(size=(49, 4)).astype("float32")
    y = np.stack([x[:, 0] * 2, x[:, 1]], axis=1)
    with run.scope():
        keras.utils.set_random_seed(0)
        model = run.ours(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
        metrics = [rmse, mean, rate, of_words, keras.losses.MeanSquaredError(name="object"), "mae"]
        correlation = keras.metrics.PearsonCorrelation(axis=0, name="correlation")
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[*metrics, correlation])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluated = model.evaluate(x[:48], y[:48], batch_size=16, verbose=0, return_dict=True)
        trained = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history  # of the last batch one replica has a row
        with run.scope():
            functions = {"rmse": rmse, "mean": mean, "words": of_words, "object": keras.losses.MeanSquaredError()}
            wrapped = [keras.metrics.MeanMetricWrapper(one, name=f"stepped {name}") for name, one in functions.items()]
            step = gd.TrainStep(model, keras.optimizers.SGD(0.0), "mse", metrics=wrapped)
        for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=16).distribute(step.strategy):
            step(batch)
    said = [str(one.message) for one in caught if "metric" in str(one.message)]
    in_steps = {metric.name: float(metric.result()) for metric in wrapped}
    return {**evaluated, **{f"in fit {name}": values[0] for name, values in trained.items()}, **in_steps}, said


def of_one_output() -> list[str]:
    """What is warned of where Keras's own functions are given outputs without columns."""
    import keras

    run = Run(strategy())
    x = np.random.default_rng(1).normal(size=(12, 4)).astype("float32")
    with run.scope():
        model = run.ours(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), keras.layers.Reshape(())]))
        model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae", "mse"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, x[:, 0], batch_size=6, verbose=0)
    return [str(one.message) for one in caught if "metric" in str(one.message)]
