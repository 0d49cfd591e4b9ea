"""Programs that GPUs would run are run: no artefact of the emulation stops them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulate.devices.hosts import Hosts


def fit(make_model: Any, strategy_name: str = "MirroredStrategy", **compile_options: Any) -> list[float]:
    """Fit on 48 rows of 6 steps with 4 features; the loss of an epoch of four steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = getattr(tf.distribute, strategy_name)()
    with strategy.scope():
        model = make_model(keras)
        model.compile("adam", "sparse_categorical_crossentropy", **compile_options)
    x = np.random.default_rng(0).normal(size=(48, 6, 4)).astype("float32")
    y = np.arange(48) % 3
    losses: list[float] = model.fit(x, y, batch_size=12, epochs=1, verbose=0, shuffle=False).history["loss"]
    return losses


def dense(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((6, 4)), layers.Flatten(), layers.Dense(3, activation="softmax", dtype="float32")])


def recurrent(name: str) -> Any:
    def make(keras: Any) -> Any:
        layer = getattr(keras.layers, name)(5)
        return keras.Sequential([keras.Input((6, 4)), layer, keras.layers.Dense(3, activation="softmax")])

    return make


@pytest.mark.parametrize("name", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow)])
def test_recurrent_layers_do_not_choose_cudnn(run: Hosts, name: str) -> None:
    losses = run(fit, recurrent(name), devices=2)
    assert losses == pytest.approx(run(fit, recurrent(name), devices=1), rel=1e-5)


def test_fit_does_not_choose_xla(run: Hosts) -> None:
    assert run(fit, dense, devices=4) == pytest.approx(run(fit, dense, devices=1), rel=1e-5)


@pytest.mark.slow
def test_steps_per_execution_works_with_any_all_reduce(run: Hosts) -> None:
    def program() -> list[float]:
        return fit(dense, steps_per_execution=4)

    expected = run(program, devices=1)
    for all_reduce in ("auto", "ring", "hierarchical", "one-device"):
        assert run(program, devices=2, all_reduce=all_reduce) == pytest.approx(expected, rel=1e-5), all_reduce


def test_mixed_precision_trains(run: Hosts) -> None:
    def program() -> list[float]:
        import keras

        keras.mixed_precision.set_global_policy("mixed_float16")
        return fit(dense)

    assert run(program, devices=2) == pytest.approx(run(program, devices=1), rel=1e-2)


def test_convolutions_train(run: Hosts) -> None:
    def model(keras: Any) -> Any:
        layers = keras.layers
        stack = [layers.Conv1D(4, 3), layers.BatchNormalization(synchronized=True), layers.Flatten()]
        return keras.Sequential([keras.Input((6, 4)), *stack, layers.Dense(3, activation="softmax")])

    assert run(fit, model, devices=3) == pytest.approx(run(fit, model, devices=1), rel=1e-4)


@pytest.mark.slow
def test_programs_of_keras_2_train(run: Hosts) -> None:
    def program() -> list[float]:
        import numpy as np
        import tensorflow as tf
        import tf_keras

        tf_keras.utils.set_random_seed(1)
        gpus = [f"/gpu:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]
        strategy = tf.distribute.MirroredStrategy(gpus)
        with strategy.scope():
            layers = [tf_keras.layers.LSTM(5), tf_keras.layers.Dense(3, activation="softmax")]
            model = tf_keras.Sequential(layers)
            model.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=2)
        x = np.random.default_rng(0).normal(size=(48, 6, 4)).astype("float32")
        losses: list[float] = model.fit(x, np.arange(48) % 3, batch_size=12, epochs=1, verbose=0, shuffle=False).history["loss"]
        return losses

    environment = {"TF_USE_LEGACY_KERAS": "1"}
    assert run(program, devices=2, environment=environment) == pytest.approx(run(program, devices=1), rel=1e-4)
