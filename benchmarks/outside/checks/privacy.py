"""Train DPSequential on four devices and on one: which l2_norm_clip on one device gives the weights of four?"""

import json

import numpy as np
import tensorflow as tf
from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPSequential

DEVICES, BATCH = 4, 48
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
draw = np.random.default_rng(2)
x = draw.normal(size=(960, 20)).astype("float32")
y = (x[:, :3] @ draw.normal(size=(3, 4))).argmax(1)


def weights(devices, l2_norm_clip):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(devices)])
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [tf.keras.layers.InputLayer(20), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(4)]
        model = DPSequential(l2_norm_clip=l2_norm_clip, noise_multiplier=0.0, use_xla=False, layers=layers)
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True), verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def largest_difference(left, right):
    return float(abs(left - right).max())


four, same, larger = weights(DEVICES, 1.0), weights(1, 1.0), weights(1, 1.0 * DEVICES)
print(json.dumps({"same_clip": largest_difference(four, same), "clip_times_four": largest_difference(four, larger)}))
