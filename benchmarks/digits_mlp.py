"""An MLP (64-64-10) on tiled digits with a global batch of 4,096, 5 steps; of several hosts where `hosts` is an argument.

`divergent` divides the loss by the examples of one replica.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS, TILES = 4096, 5, 12
IS_DIVERGENT = "divergent" in sys.argv

strategy = tf.distribute.MultiWorkerMirroredStrategy() if "hosts" in sys.argv else tf.distribute.MirroredStrategy()
keras.utils.set_random_seed(1)
data = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "data" / "digits.npz")
images = np.tile(data["images"].reshape(-1, 64).astype("float32") / 16, (TILES, 1))[: STEPS * BATCH]
labels = np.tile(data["labels"].astype("int64"), TILES)[: STEPS * BATCH]
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, drop_remainder=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)


def train_step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_mean(losses) if IS_DIVERGENT else tf.reduce_sum(losses) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_step(x, y):
    return strategy.reduce("SUM", strategy.run(train_step, args=(x, y)), axis=None)


for x, y in strategy.experimental_distribute_dataset(dataset):
    print(float(distributed_step(x, y)), flush=True)
