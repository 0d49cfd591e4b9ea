"""A training with one feature: `program.py FEATURE ours|keras [KIND]`. It is what a user writes, but for the choice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpudist_core as gd
from benchmarks.features.feature import BATCH, FEATURES, Feature

DATA = Path(__file__).resolve().parents[2] / "fixtures" / "data"
EPOCHS = 2


class OwnTrainStep(keras.Sequential):
    """A model that trains itself, as Keras's guide has it."""

    def train_step(self, data: Any) -> Any:
        x, y = data[0], data[1]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def rows_of(feature: Feature) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs, labels, and weights where the feature has them."""
    if feature.text:
        words = np.load(DATA / "words.npz")
        x, y = words["letters"][: feature.rows].astype("int64"), words["syllables"][: feature.rows].astype("int64")
    else:
        digits = np.load(DATA / "digits.npz")
        x = digits["images"][: feature.rows].reshape(-1, 64).astype("float32") / 16
        y = digits["labels"][: feature.rows].astype("int64")
    return x, y, np.linspace(0.2, 1.8, len(y)).astype("float32") if feature.weights else None


def model_of(feature: Feature, strategy: Any) -> Any:
    kind = OwnTrainStep if feature.style == "train_step" else keras.Sequential
    if feature.text:
        embedding = keras.layers.Embedding(27, 8, mask_zero=True)
        if feature.sharded:
            embedding = gd.ShardedEmbedding(27, 8, strategy)
        pooled = [embedding, keras.layers.GlobalAveragePooling1D()]
        return kind([keras.Input((12,), dtype="int64"), *pooled, keras.layers.Dense(10)])
    hidden = feature.layers(keras.layers) if feature.layers else [keras.layers.Dense(32, activation="relu")]
    return kind([keras.Input((64,)), *hidden, keras.layers.Dense(10, dtype="float32")])


def optimizer_of(feature: Feature) -> Any:
    name, arguments = feature.optimizer
    return getattr(keras.optimizers, name)(**arguments)


def ours(feature: Feature, kind: str) -> None:
    strategy = gd.make_strategy(kind)
    arrays = tuple(part for part in rows_of(feature) if part is not None)
    data = gd.Pipeline.from_arrays(arrays, global_batch_size=BATCH)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model, optimizer = model_of(feature, strategy), optimizer_of(feature)
        if feature.style != "own step":
            model = gd.distributed(model, draws=feature.draws)
            metrics = feature.metrics(keras) if feature.metrics else None
            model.compile(optimizer, loss, metrics=metrics, **feature.compile)
    if feature.style == "own step":
        step = gd.TrainStep(model, optimizer, loss, draws=feature.draws)
        for _ in range(EPOCHS):
            for batch in data.distribute(strategy):
                step(batch)
    else:
        model.fit(data, epochs=EPOCHS, verbose=0, **feature.fit)


def plain(feature: Feature, kind: str) -> None:
    strategy = plain_strategy(kind)
    x, y, weights = rows_of(feature)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model, optimizer = model_of(feature, strategy), optimizer_of(feature)
        if feature.style != "own step":
            metrics = feature.metrics(keras) if feature.metrics else None
            model.compile(optimizer, loss, metrics=metrics, **feature.compile)
    if feature.style == "own step":
        plain_loop(feature, strategy, model, optimizer)
    else:
        model.fit(x, y, batch_size=BATCH, sample_weight=weights, shuffle=False, epochs=EPOCHS, verbose=0, **feature.fit)


def plain_strategy(kind: str) -> Any:
    gpus = [device.name.replace("/physical_device:", "") for device in tf.config.list_physical_devices("GPU")]
    if kind == "central-storage":
        return tf.distribute.experimental.CentralStorageStrategy(compute_devices=gpus, parameter_device="CPU:0")
    return tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()


def plain_loop(feature: Feature, strategy: Any, model: Any, optimizer: Any) -> None:
    """TensorFlow's tutorial on custom training: the loss of a batch divided by the size of a global batch."""
    arrays = tuple(part for part in rows_of(feature) if part is not None)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH))
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            per_example = loss_object(batch[1], model(batch[0], training=True), *batch[2:])
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def distributed_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(train_step, args=(batch,)), axis=None)

    for _ in range(EPOCHS):
        for batch in dataset:
            distributed_step(batch)


if __name__ == "__main__":
    wanted = FEATURES[sys.argv[1]]
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(wanted.policy)
    {"ours": ours, "keras": plain}[sys.argv[2]](wanted, sys.argv[3] if len(sys.argv) > 3 else "auto")
