"""Trainings by Keras's own fit, each with something that could go wrong on several replicas; they run on any topology."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[3] / "fixtures" / "data"
Case = Callable[["Run"], dict[str, Any]]


def strategy() -> Any:
    import tensorflow as tf

    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.OneDeviceStrategy("CPU:0")


def digits(rows: int) -> tuple[Any, Any]:
    data = np.load(DATA / "digits.npz")
    return data["images"][:rows].reshape(-1, 64).astype("float32") / 16, data["labels"][:rows].astype("int64")


def words(rows: int) -> tuple[Any, Any]:
    data = np.load(DATA / "words.npz")
    return data["letters"][:rows].astype("int64"), data["syllables"][:rows].astype("int64")


class Run:
    """One way to train: by gpudist_core on a strategy, or by Keras alone on one device.

    Args:
        where: The strategy; None for Keras alone.
    """

    def __init__(self, where: Any) -> None:
        self.where = where

    def scope(self) -> Any:
        import contextlib

        return contextlib.nullcontext() if self.where is None else self.where.scope()

    def ours(self, model: Any, **options: Any) -> Any:
        """The model, distributed where there is a strategy."""
        from gpudist_core.keras_model import distributed

        return model if self.where is None else distributed(model, **options)

    def sequential(self, *layers: Any, kind: Any = None, options: Any = None, **compiled: Any) -> Any:
        """A compiled model of digits."""
        import keras

        with self.scope():
            model = (kind or keras.Sequential)([keras.Input((64,)), *[layer() for layer in layers], keras.layers.Dense(10)])
            model = self.ours(model, **(options or {}))
            optimizer = compiled.pop("optimizer", lambda: keras.optimizers.SGD(0.2))()
            metrics = compiled.pop("metrics", lambda: ["accuracy"])()
            loss = compiled.pop("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.compile(optimizer, loss, metrics=metrics, **compiled)
        return model

    def fit(self, model: Any, x: Any, y: Any = None, **options: Any) -> dict[str, Any]:
        """The history and the weights of a training in order."""
        options = {"batch_size": 24, "epochs": 2, "verbose": 0, "shuffle": False, **options}
        history = model.fit(x, y, **{name: value for name, value in options.items() if value is not None})
        return {"history": history.history, **weights_of(model)}


def weights_of(model: Any) -> dict[str, Any]:
    return {"weights": [variable.numpy() for variable in model.weights]}


def hidden() -> Any:
    import keras

    return keras.layers.Dense(16, activation="relu")


def all_of_it(run: Run) -> dict[str, Any]:
    """An empty replica in the last batch; validation, evaluation and prediction of rows that do not divide."""
    x, y = digits(97)
    model = run.sequential(hidden)
    seen = run.fit(model, x, y, validation_data=(x[:31], y[:31]), validation_batch_size=10)
    return {**seen, "evaluate": model.evaluate(x[:26], y[:26], verbose=0), "predict": model.predict(x[:35], verbose=0)}


def first_batch(run: Run) -> dict[str, Any]:
    x, y = digits(60)
    return run.fit(run.sequential(hidden, steps_per_execution=2), x, y, batch_size=25, validation_split=0.2)


def weighted(run: Run) -> dict[str, Any]:
    x, y = digits(97)
    weights = np.linspace(0.1, 2, 97).astype("float32")
    model = run.sequential(hidden, weighted_metrics=["accuracy"])
    seen = run.fit(model, x, y, sample_weight=weights, epochs=1)
    again = run.fit(model, x, y, class_weight={0: 2.0, 3: 0.5}, epochs=1)
    return {**again, "first": seen, "evaluate": model.evaluate(x, y, sample_weight=weights, verbose=0)}


def accumulated(run: Run) -> dict[str, Any]:
    """With clipping, a schedule of the learning rate, and averages that overwrite."""
    import keras

    def optimizer() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
        averaged = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        return keras.optimizers.Adam(rate, gradient_accumulation_steps=3, global_clipnorm=0.05, **averaged)

    x, y = digits(97)
    model = run.sequential(hidden, optimizer=optimizer)
    return {**run.fit(model, x, y), "iterations": int(model.optimizer.iterations)}


def own_losses(run: Run) -> dict[str, Any]:
    """Of variables and activations, with moments that cross replicas between the two."""
    import keras

    def regularised() -> Any:
        return keras.layers.Dense(16, kernel_regularizer="l2", activity_regularizer="l2")

    x, y = digits(97)
    return run.fit(run.sequential(regularised, keras.layers.BatchNormalization, hidden), x, y)


def metrics(run: Run) -> dict[str, Any]:
    import keras

    class Largest(keras.metrics.Metric):
        """How many rows have a large output."""

        def __init__(self) -> None:
            super().__init__(name="large")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.rows.assign_add(keras.ops.sum(keras.ops.cast(keras.ops.max(y_pred, -1) > 0.2, "float32")))

        def result(self) -> Any:
            return self.rows

    def one_number(y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - y_pred))

    x, labels = digits(96)
    y = np.eye(10, dtype="float32")[labels]
    model = run.sequential(
        hidden,
        lambda: keras.layers.Dense(10, activation="softmax"),
        metrics=lambda: [keras.metrics.AUC(num_thresholds=20), keras.metrics.F1Score(), Largest(), one_number, "mse"],
        loss="mse",
    )
    seen = run.fit(model, x, y, batch_size=20)
    # Keras alone gives each batch the same weight in the mean of a metric that is one number for the batch.
    return {**seen, "evaluate": model.evaluate(x, y, batch_size=20, verbose=0)}


def callbacks(run: Run) -> dict[str, Any]:
    """What callbacks are told in each step."""
    import keras

    x, y = digits(97)
    told: list[Any] = []
    kept: list[Any] = []

    class Listener(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kept.append(logs)
            told.append((batch, self.params["steps"], sorted(logs)))

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            told.append((batch, dict(logs)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            told.append((epoch, {**logs}))
            self.model.stop_training = epoch == 3

    model = run.sequential(hidden)
    stop = keras.callbacks.EarlyStopping("loss", patience=5)
    seen = run.fit(model, x, y, initial_epoch=2, epochs=7, callbacks=[Listener(), stop], validation_data=(x[:7], y[:7]))
    return {**seen, "told": told, "kept": [dict(logs) for logs in kept]}


def of_steps(run: Run) -> dict[str, Any]:
    """Epochs of some of the batches of other kinds of data."""
    import keras
    import tensorflow as tf

    x, y = digits(97)

    class Slices(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, place: int) -> Any:
            return x[place * 22 :][:22], y[place * 22 :][:22]

    def generator() -> Any:
        while True:
            yield from (Slices()[place] for place in range(5))

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(22).repeat()
    model = run.sequential(hidden)
    each = [run.fit(model, data, batch_size=None, steps_per_epoch=3) for data in (dataset, generator())]
    return {"each": each, **run.fit(model, Slices(), batch_size=None, shuffle=False)}


def own_train_step(run: Run) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred) + 0.1 * tf.reduce_mean(tf.square(y_pred))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics} | {"latest": loss}

    x, y = digits(97)
    return run.fit(run.sequential(hidden, kind=Own), x, y)


def own_compute_loss(run: Run) -> dict[str, Any]:
    import keras

    class Own(keras.Sequential):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
            each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            return keras.ops.mean(each) + 0.01 * keras.ops.mean(keras.ops.square(y_pred))

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            seen = super().compute_metrics(x, y, y_pred, sample_weight)
            return seen | {"half": seen["accuracy"]}

    x, y = digits(97)
    model = run.sequential(hidden, kind=Own)
    return {**run.fit(model, x, y, epochs=1), "evaluate": model.evaluate(x[:30], y[:30], verbose=0, return_dict=True)}


def several_outputs(run: Run) -> dict[str, Any]:
    """Inputs in a dict, two losses with weights and a target for each."""
    import keras

    x, y = digits(80)
    with run.scope():
        left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
        joined = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "label": keras.layers.Dense(10, name="label")(joined),
            "parity": keras.layers.Dense(1, name="parity")(joined),
        }
        model = run.ours(keras.Model({"left": left, "right": right}, outputs))
        losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "parity": "mse"}
        model.compile(
            "sgd", losses, loss_weights={"label": 1.0, "parity": 0.5}, metrics={"label": ["accuracy"], "parity": ["mae"]}
        )
    inputs = {"left": x[:, :32], "right": x[:, 32:]}
    seen = run.fit(model, inputs, {"label": y, "parity": (y % 2).astype("float32")[:, None]}, batch_size=20)
    return {**seen, "predict": model.predict({name: part[:7] for name, part in inputs.items()}, verbose=0)}


def masked(run: Run) -> dict[str, Any]:
    """Words of different lengths, letter by letter; the model is built by its first batch."""
    import keras

    x, _ = words(49)
    with run.scope():
        layers = [keras.layers.Embedding(27, 6, mask_zero=True), keras.layers.Dense(8, activation="relu")]
        model = run.ours(keras.Sequential([*layers, keras.layers.Dense(27)]))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
    return run.fit(model, x, x, batch_size=16)


def two_optimizers(run: Run) -> dict[str, Any]:
    """As a GAN has them, made by the first step."""
    import keras
    import tensorflow as tf

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.down = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4)])
            self.up = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
            self.tracker = keras.metrics.Mean(name="error")

        def compile(self, one: Any, other: Any) -> None:
            super().compile()
            self.one, self.other = one, other

        @property
        def metrics(self) -> Any:
            return [self.tracker]

        def train_step(self, x: Any) -> Any:
            for optimizer, part in ((self.one, self.down), (self.other, self.up)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(x - self.up(self.down(x))))
                optimizer.apply_gradients(zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights, strict=True))
            self.tracker.update_state(loss)
            return {"error": self.tracker.result()}

    x, _ = digits(97)
    with run.scope():
        model = run.ours(Pair())
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    return run.fit(model, x)


def on_batch(run: Run) -> dict[str, Any]:
    x, y = digits(97)
    model = run.sequential(hidden)
    trained = [model.train_on_batch(x[:n], y[:n], return_dict=True) for n in (22, 23, 2)]
    weight = model.train_on_batch(x[:5], y[:5], class_weight={0: 3.0})
    tested = model.test_on_batch(x[:9], y[:9])
    return {"logs": [trained, weight, tested, model.predict_on_batch(x[:5])], **weights_of(model)}


def eagerly(run: Run) -> dict[str, Any]:
    x, y = digits(30)
    model = run.sequential(hidden, run_eagerly=True)
    return {**run.fit(model, x, y, epochs=1, batch_size=14), "predict": model.predict(x[:5], verbose=0)}


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        all_of_it,
        first_batch,
        weighted,
        accumulated,
        own_losses,
        metrics,
        callbacks,
        of_steps,
        own_train_step,
        own_compute_loss,
        several_outputs,
        masked,
        two_optimizers,
        on_batch,
        eagerly,
    )
}


def train_all(ours: bool, names: list[str] | None = None) -> dict[str, Any]:
    """What each training gives; an exception as its text."""
    import keras

    where = strategy() if ours else None
    results: dict[str, Any] = {}
    for name in names or CASES:
        keras.utils.set_random_seed(3)
        results[name] = CASES[name](Run(where))
    return results
