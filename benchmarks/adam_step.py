"""Train with Adam in a compiled step, two steps. Argument: cnn (the digits) or resnet50 (32 x 32)."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from benchmarks.digits_cnn import cnn, digits

BATCH = {"cnn": 256, "resnet50": 8}[sys.argv[1]]
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
if sys.argv[1] == "cnn":
    images, labels = digits((8, 8, 1))
else:
    images, labels = np.ones((2 * BATCH, 32, 32, 3), np.float32), np.zeros(2 * BATCH, np.int64)
data = tf.data.Dataset.from_tensor_slices((images, labels)).take(2 * BATCH).batch(BATCH)
with strategy.scope():
    model = cnn() if sys.argv[1] == "cnn" else keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    optimizer = keras.optimizers.Adam(1e-3)
    from_logits = sys.argv[1] == "cnn"
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits, reduction="none")


@tf.function
def train(batch):  # type: ignore[no-untyped-def]
    def step(x, y):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(cross_entropy(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


for batch in strategy.experimental_distribute_dataset(data):
    loss = train(batch)
print(f"loss {float(loss):.4f}")
