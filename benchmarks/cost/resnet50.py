"""ResNet50 in a compiled step, 32 x 32, 20 steps. Argument: equivalent (synchronized statistics), by-design, or divergent."""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH = sys.argv[1], 20, 8
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(STEPS * BATCH, 32, 32, 3)).astype("float32"), rng.integers(0, 10, STEPS * BATCH)
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))


def synchronized(layer):
    is_normalization = isinstance(layer, tf.keras.layers.BatchNormalization)
    more = {"synchronized": True} if is_normalization and VARIANT != "by-design" else {}
    return type(layer).from_config({**layer.get_config(), **more})


with strategy.scope():
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    model = tf.keras.models.clone_model(model, clone_function=synchronized)
    optimizer = tf.keras.optimizers.SGD(0.01)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(reduction="none")


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
