"""The program that verification is timed on: a compiled loop on handwritten digits. `digits_loop.py STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

STEPS = int(sys.argv[1])
BATCH = 48
DATA = Path(__file__).resolve().parent.parent / "fixtures" / "data" / "digits.npz"

strategy = tf.distribute.MirroredStrategy()
with np.load(DATA) as digits:
    images = (digits["images"].reshape(-1, 64) / 16).astype("float32")
    labels = digits["labels"].astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(1797, seed=1).repeat().batch(BATCH)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.005)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def step(x, y):  # type: ignore[no-untyped-def]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train(x, y):  # type: ignore[no-untyped-def]
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)


batches = iter(strategy.experimental_distribute_dataset(dataset))
for _ in range(STEPS):
    loss = train(*next(batches))
print(f"loss {float(loss):.4f}")
