"""DP-SGD of TensorFlow Privacy: its DPSequential clips the gradient of each example; the noise is off, to be comparable."""

import os

import numpy as np
import tensorflow as tf
from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPSequential

BATCH = 48
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(2)
x = draw.normal(size=(960, 20)).astype("float32")
y = (x[:, :3] @ draw.normal(size=(3, 4))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)

with strategy.scope():
    layers = [tf.keras.layers.InputLayer(20), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(4)]
    model = DPSequential(l2_norm_clip=1.0, noise_multiplier=0.0, use_xla=False, layers=layers)
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

model.fit(dataset, epochs=1, verbose=2)
