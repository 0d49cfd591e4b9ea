"""Keras's own fit, evaluate and predict with parameter servers give what Keras alone gives on one device."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.conftest import OnHosts
from tests.core.parameter_servers.programs import data, furthest

ROUNDING = 2e-6


def _weighted(keras: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Regularised, with dropout, weights of rows, validation, metrics of both kinds, a callback, an uneven last batch."""
    layers = [keras.layers.Dense(8, "tanh", kernel_regularizer="l2"), keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(3)]
    entropy = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
    compiled = {"optimizer": keras.optimizers.Adam(0.01, clipnorm=0.5), "metrics": ["accuracy"], "weighted_metrics": [entropy]}
    x, y = data()
    stops = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10, restore_best_weights=True)
    fitted = {"epochs": 4, "sample_weight": np.linspace(0, 2, len(y)), "validation_data": (x[:9], y[:9]), "callbacks": [stops]}
    return keras.Sequential([keras.Input((6,)), *layers]), compiled, fitted


def _masked(keras: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Masks, classes with weights, averages of the variables, several batches in a call; built by the data."""
    layers = [keras.layers.Embedding(7, 4, mask_zero=True), keras.layers.LSTM(5), keras.layers.Dense(3)]
    compiled = {"optimizer": keras.optimizers.SGD(0.5, momentum=0.9, use_ema=True), "steps_per_execution": 2}
    return keras.Sequential(layers), compiled, {"epochs": 2, "class_weight": {0: 0.5, 1: 2.0}}


def _ignoring(keras: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A class that does not count, and weights of rows."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    fitted = {"epochs": 2, "sample_weight": np.linspace(0, 2, len(data()[1]))}
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), {"optimizer": "sgd", "loss": loss}, fitted


def _of_a_function(keras: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Targets of shape (rows,) and outputs of shape (rows, 1), which Keras gives one shape."""
    compiled = {"optimizer": "sgd", "loss": lambda y, y_pred: keras.ops.square(y - y_pred)}
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]), compiled, {"epochs": 2}


def _fit(build: Any, strategy: Any) -> dict[str, Any]:
    """Fit with the strategy's servers, or by Keras alone where there is no strategy."""
    import contextlib

    import keras

    import gpudist_core as gd

    keras.utils.set_random_seed(1)
    x, y = data()
    if build is _masked:
        x = (np.abs(x) * 3).astype("int32") % 7
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, compiled, fitted = build(keras)
        model = gd.distributed(model, draws="row") if strategy else model
        model.compile(**{"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled})
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **fitted).history
    return {
        "history": history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True),
        "predicted": model.predict(x[:5], batch_size=2, verbose=0),
        "iterations": int(model.optimizer.iterations),
        "on servers": all("/job:ps" in v.value.device for v in model.weights) if strategy else None,
    }


def _on_chief(builds: list[Any]) -> dict[str, Any]:
    import gpudist_core as gd

    strategy = gd.make_strategy()
    return {build.__name__: (_fit(build, strategy), _fit(build, None)) for build in builds}


def _check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["on servers"]
    assert ours["iterations"] == theirs["iterations"]
    assert furthest(ours["weights"], theirs["weights"]) < ROUNDING
    assert ours["history"].keys() == theirs["history"].keys()
    for name, values in theirs["history"].items():
        np.testing.assert_allclose(ours["history"][name], values, rtol=1e-5, err_msg=name)
    assert ours["evaluated"].keys() == theirs["evaluated"].keys()
    np.testing.assert_allclose([*ours["evaluated"].values()], [*theirs["evaluated"].values()], rtol=1e-5)
    np.testing.assert_allclose(ours["predicted"], theirs["predicted"], rtol=1e-4, atol=1e-5)


def test_fit_is_that_of_one_device(on_hosts: OnHosts) -> None:
    found = on_hosts("2x1+1ps", _on_chief, [_weighted, _masked, _ignoring, _of_a_function])[0]
    for results in found.values():
        _check(*results)
    assert len(found["_weighted"][0]["history"]["loss"]) == 2, "it was stopped early"


def _in_parts() -> dict[str, Any]:
    """Variables that the strategy's partitioner divides among two servers, and a pipeline that is shuffled."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    found = {}
    for name, strategy in (("ours", gd.make_strategy(variable_partitioner=partitioner)), ("alone", None)):
        keras.utils.set_random_seed(1)
        place = strategy or tf.distribute.OneDeviceStrategy("/job:chief/task:0/device:CPU:0")
        with place.scope():
            model = gd.distributed(keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.05), loss)
        rows = gd.Pipeline.from_arrays(data(), global_batch_size=8, shuffle=True, seed=3)
        losses = [model.fit(rows, epochs=2, verbose=0).history["loss"], model.fit(rows, verbose=0).history["loss"]]
        found[name] = losses, rows.epoch, [np.asarray(tf.convert_to_tensor(v.value)) for v in model.trainable_weights]
    return found


def test_variables_in_parts_and_a_pipeline_are_trained_alike(on_hosts: OnHosts) -> None:
    found = on_hosts("3x1+2ps", _in_parts)[0]
    (losses, epoch, weights), (its_losses, its_epoch, its_weights) = found["ours"], found["alone"]
    assert epoch == its_epoch
    np.testing.assert_allclose(np.concatenate(losses), np.concatenate(its_losses), rtol=1e-5)
    assert furthest(weights, its_weights) < ROUNDING


def _refused() -> dict[str, str]:
    import keras

    import gpudist_core as gd

    strategy = gd.make_strategy()
    x, y = data()

    class OwnStep(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            raise AssertionError

    def made(kind: Any = keras.Sequential, normalized: bool = False, **compiled: Any) -> Any:
        with strategy.scope():
            more = [keras.layers.BatchNormalization()] if normalized else []
            model = gd.distributed(kind([keras.Input((6,)), *more, keras.layers.Dense(3)]))
            model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
        return model

    calls = {
        "own step": lambda: made(OwnStep),
        "two losses": lambda: made(loss=["mse", "mae"]),
        "a sum": lambda: made(loss=keras.losses.MeanSquaredError("sum")),
        "accumulation": lambda: made(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
        "XLA": lambda: made(jit_compile=True),
        "moments": lambda: made(normalized=True, loss="sparse_categorical_crossentropy").fit(x, y, batch_size=8, verbose=0),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "it was done"
        except (gd.UsageError, gd.Unavailable) as error:
            found[name] = str(error)
    return found


def test_what_workers_cannot_be_sent_is_refused(on_hosts: OnHosts) -> None:
    found = on_hosts("2x1+1ps", _refused)[0]
    by_hand = "Write the loop with gd.CoordinatedTraining."
    assert found["own step"] == (
        f"With parameter servers fit needs Keras's own train_step, because workers run it. Received: model='OwnStep'. {by_hand}"
    )
    one = "With parameter servers fit needs one loss that is a mean over the examples. Received: loss="
    assert found["two losses"] == f"{one}['mse', 'mae']. {by_hand}"
    assert found["a sum"].startswith(one)
    assert found["accumulation"] == (
        "With parameter servers fit must make an update of each batch. Received: gradient_accumulation_steps=2. Leave it "
        "out, or write the loop with gd.CoordinatedTraining(accumulate=...)."
    )
    assert found["XLA"] == "XLA cannot compile a step that workers run. Received: jit_compile=True. Leave jit_compile out."
    assert found["moments"].startswith("A lock-step model must not change variables in its forward pass. Received: variables=")
