"""A small network in a compiled step, 400 steps. Argument: equivalent, by-design (dropout), or divergent (a wrong mean)."""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH = sys.argv[1], 400, 32
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(STEPS * BATCH, 64)).astype("float32"), rng.integers(0, 10, STEPS * BATCH)
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
layers = tf.keras.layers
with strategy.scope():
    dropped = [layers.Dropout(0.2)] if VARIANT == "by-design" else []
    model = tf.keras.Sequential([layers.Dense(64, "relu"), *dropped, layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(1e-3)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = cross_entropy(y, model(x, training=True))
            mean = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            loss = tf.reduce_mean(losses) if VARIANT == "divergent" else mean
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


for batch in data:
    loss = train(batch)
print("loss", float(loss))
