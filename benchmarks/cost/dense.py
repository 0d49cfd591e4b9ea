"""A dense network of 125 million parameters, 5 steps. Argument: equivalent, by-design (dropout) or divergent (a wrong mean)."""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH, WIDTH = sys.argv[1], 5, 8, 5584
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(STEPS * BATCH, WIDTH)).astype("float32")
y = rng.integers(0, 10, STEPS * BATCH)
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
layers = tf.keras.layers

with strategy.scope():
    wide = [layers.Dense(WIDTH, activation="relu", name=f"wide_{i}") for i in range(4)]
    if VARIANT == "by-design":
        wide.insert(2, layers.Dropout(0.1))
    model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *wide, layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(1e-4)
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
