"""Training with gpudist_core leaves TensorFlow and Keras as they are for everybody else in the process."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from tests.core.conftest import OnHosts

PACKAGES = ("tensorflow", "keras", "tf_keras")
Everything = dict[tuple[str, str], Any]


def _everything() -> Everything:
    """Every callable of every module, and every method and property of every class."""
    found: Everything = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in PACKAGES:
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                found[module_name, name] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] in PACKAGES:
                owner = f"{value.__module__}.{value.__qualname__}"
                kept = {(owner, attribute): one for attribute, one in list(vars(value).items())}
                found |= {
                    key: one
                    for key, one in kept.items()
                    if callable(one) or isinstance(one, (property, staticmethod, classmethod))
                }
    return found


def _changed(before: Everything) -> list[str]:
    """What differs by identity. Modules that are imported later may bring more, but no class has other attributes."""
    now, owners = _everything(), {owner for owner, _ in before}
    lost = [key for key, value in before.items() if now.get(key) is not value]
    added = [key for key in now.keys() - before.keys() if key[0] in owners and key[0] not in sys.modules]
    return sorted(".".join(key) for key in [*lost, *added])


class _Other:
    """Compute with TensorFlow and Keras in another thread, in the middle of a step."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def compute(self) -> None:
        thread = threading.Thread(target=lambda: self.results.append(_plain()))
        thread.start()
        thread.join()


def _plain() -> list[float]:
    """A training without gpudist_core, that uses much of what a step replaces."""
    import keras
    import tensorflow as tf

    seed = keras.random.SeedGenerator(3)
    x = keras.random.normal((6, 8, 8, 2), seed=seed)
    kernel = tf.Variable(np.linspace(-1, 1, 3 * 3 * 2 * 4).reshape(3, 3, 2, 4).astype("float32"))
    layer, normalize = (
        keras.layers.LSTM(3, kernel_initializer="ones", recurrent_initializer="zeros"),
        keras.layers.BatchNormalization(),
    )
    mean, loss = keras.metrics.Mean(), keras.losses.MeanSquaredError()
    with tf.GradientTape() as tape:
        y = normalize(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), training=True)
        y = layer(tf.reshape(keras.ops.add(y, y), (6, 64, 4)))
        y = keras.layers.Dropout(0.5, seed=1)(y, training=True)
        value = loss(tf.ones((6, 3)), y) + tf.reduce_mean(tf.nn.max_pool2d(x, 2, 2, "VALID"))
    [gradient], norm = tf.clip_by_global_norm(tape.gradient(value, [kernel]), 0.1)
    mean.update_state(value)
    moving = [float(number) for number in np.ravel(normalize.moving_mean)]
    return [float(value), float(mean.result()), float(norm), *moving, *map(float, np.ravel(tf.clip_by_value(gradient, -1, 1)))]


def _train() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    alone, other = _plain(), _Other()

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            other.compute()
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def layers() -> list[Any]:
        recurrent = [keras.layers.Reshape((4, 1)), keras.layers.LSTM(3), keras.layers.BatchNormalization()]
        return [keras.Input((4,)), *recurrent, keras.layers.Dropout(0.5), keras.layers.Dense(1, activity_regularizer="l2")]

    def failing(y: Any, y_pred: Any) -> Any:
        raise LookupError(y)

    strategy = gd.make_strategy()
    x, y = np.linspace(0, 1, 40, dtype="float32").reshape(10, 4), np.ones((10, 1), "float32")
    data = gd.Pipeline.from_arrays((x, y), global_batch_size=5)
    with strategy.scope():
        own, usual, third = Own(layers()), keras.Sequential(layers()), keras.Sequential(layers())
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]
    keras.Sequential(layers()).compile("sgd", "mse", metrics=["mae"])  # imports what compile imports
    before = _everything()
    found: dict[str, list[str]] = {}

    def look(place: str) -> None:
        found[place] = sorted({*found.get(place, []), *_changed(before)})

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            look("at the beginning of fit")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            look("between steps of fit")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            look("in the validation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            look("after an epoch")

    with strategy.scope():
        for model in (own, usual):
            gd.distributed(model, draws="row").compile("sgd", "mse", metrics=["mae"])
    look("after compile")
    own.fit(data, epochs=2, verbose=0, callbacks=[Look()], validation_data=data)
    usual.fit(x, y, batch_size=5, epochs=2, shuffle=True, verbose=0, callbacks=[Look()], validation_split=0.2)
    look("after fit")
    usual.evaluate(data, verbose=0)
    usual.predict(x, verbose=0)
    look("after predict")
    step = gd.TrainStep(third, optimizers[0], "mse", metrics=[])
    for batch in data.distribute(strategy):
        step(batch)
    look("after a step")
    try:
        gd.TrainStep(third, optimizers[1], failing)(next(iter(data.distribute(strategy))))
    except LookupError:
        look("after an error")
    same = [result == alone for result in [*other.results, _plain()]]
    return {"changed": {place: names for place, names in found.items() if names}, "places": len(found), "same": same}


def test_every_function_and_property_is_what_it_was_before_between_and_after_steps(on_hosts: OnHosts) -> None:
    [found] = on_hosts("1x2", _train)
    assert found["changed"] == {}
    assert found["places"] == 9
    assert len(found["same"]) > 2
    assert all(found["same"])
