"""A transformer of 4 layers, 256 wide, 20 steps. Argument: equivalent, by-design (dropout), or divergent (a wrong mean)."""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH = sys.argv[1], 20, 8
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).integers(0, 1000, (STEPS * BATCH, 64))
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x[:, :-1], x[:, 1:])).batch(BATCH))
layers = tf.keras.layers


def decoder(width=256, depth=4):
    inputs = tf.keras.Input((63,), dtype="int64")
    hidden = layers.Embedding(1000, width)(inputs)
    for _ in range(depth):
        attended = layers.MultiHeadAttention(4, width // 4)(hidden, hidden, use_causal_mask=True)
        if VARIANT == "by-design":
            attended = layers.Dropout(0.1)(attended)
        hidden = layers.LayerNormalization()(hidden + attended)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(hidden)))
    return tf.keras.Model(inputs, layers.Dense(1000)(hidden))


with strategy.scope():
    model = decoder()
    optimizer = tf.keras.optimizers.Adam(1e-4)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(cross_entropy(y, model(x, training=True)), axis=1)
            mean = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            loss = tf.reduce_mean(losses) if VARIANT == "divergent" else mean
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


for batch in data:
    loss = train(batch)
print("loss", float(loss))
