"""MobileNetV2 in fit, 32 x 32, 20 steps. Argument: equivalent (synchronized statistics), by-design, or divergent (clipnorm)."""

import sys

import numpy as np
import tensorflow as tf

VARIANT, STEPS, BATCH = sys.argv[1], 20, 16
tf.keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(STEPS * BATCH, 32, 32, 3)).astype("float32"), rng.integers(0, 10, STEPS * BATCH)


def synchronized(layer):
    is_normalization = isinstance(layer, tf.keras.layers.BatchNormalization)
    more = {"synchronized": True} if is_normalization and VARIANT != "by-design" else {}
    return type(layer).from_config({**layer.get_config(), **more})


with strategy.scope():
    model = tf.keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=10)
    model = tf.keras.models.clone_model(model, clone_function=synchronized)
    optimizer = tf.keras.optimizers.SGD(0.01, global_clipnorm=0.1 if VARIANT == "divergent" else None)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=BATCH, epochs=1, verbose=2)
