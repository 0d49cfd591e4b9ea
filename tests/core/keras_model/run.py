"""A training by Keras's own fit: with gpudist_core on the topology of this process, or by Keras alone on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[3] / "fixtures" / "data"


def strategy() -> Any:
    """The strategy of this process."""
    import tensorflow as tf

    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.OneDeviceStrategy("CPU:0")


def digits(rows: int) -> tuple[Any, Any]:
    data = np.load(DATA / "digits.npz")
    return data["images"][:rows].reshape(-1, 64).astype("float32") / 16, data["labels"][:rows].astype("int64")


def words(rows: int) -> Any:
    """Words of different lengths, each letter a number and 0 after the last."""
    return np.load(DATA / "words.npz")["letters"][:rows].astype("int64")


class Run:
    """One way to train.

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
        options = {"batch_size": 25, "epochs": 2, "verbose": 0, "shuffle": False, **options}
        history = model.fit(x, y, **{name: value for name, value in options.items() if value is not None})
        return {"history": history.history, **weights_of(model)}


def weights_of(model: Any) -> dict[str, Any]:
    return {"weights": [variable.numpy() for variable in model.weights]}


def hidden() -> Any:
    import keras

    return keras.layers.Dense(16, activation="relu")
