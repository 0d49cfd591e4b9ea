"""A U-Net of 3 levels, 48 x 48, 20 steps. Argument: equivalent (a Dice term of each image), by-design (dropout), or divergent.

Divergent is a Dice term over the replica's whole batch, which no other replica's images are part of.
"""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH = sys.argv[1], 20, 16
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 48, 48, 3)).astype("float32")
y = (x.mean(-1, keepdims=True) > 0.2).astype("float32")
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
layers = tf.keras.layers


def convolved(tensor, filters):
    for _ in range(2):
        tensor = layers.Conv2D(filters, 3, padding="same")(tensor)
        tensor = layers.Activation("gelu")(layers.GroupNormalization(4)(tensor))
    return tensor


def unet():
    image = tensor = tf.keras.Input((48, 48, 3))
    skipped = []
    for filters in (8, 16, 32):
        skipped.append(convolved(tensor, filters))
        tensor = layers.MaxPooling2D()(skipped[-1])
    tensor = convolved(tensor, 64)
    if VARIANT == "by-design":
        tensor = layers.Dropout(0.2)(tensor)
    for filters, skip in zip((32, 16, 8), reversed(skipped)):
        tensor = layers.Conv2DTranspose(filters, 2, 2)(tensor)
        tensor = convolved(layers.Concatenate()([tensor, skip]), filters)
    return tf.keras.Model(image, layers.Conv2D(1, 1)(tensor))


with strategy.scope():
    model = unet()
    optimizer = tf.keras.optimizers.Adam(1e-3)


@tf.function
def train(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            mask = tf.sigmoid(logits)
            axes = None if VARIANT == "divergent" else (1, 2, 3)
            both, each = tf.reduce_sum(mask * y, axes), tf.reduce_sum(mask, axes) + tf.reduce_sum(y, axes)
            dice = 1 - (2 * both + 1) / (each + 1)
            entropy = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits), (1, 2, 3))
            of_dice = dice / strategy.num_replicas_in_sync if VARIANT == "divergent" else tf.reduce_sum(dice) / BATCH
            loss = tf.reduce_sum(entropy) / BATCH + of_dice
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


for batch in data:
    loss = train(batch)
print("loss", float(loss))
