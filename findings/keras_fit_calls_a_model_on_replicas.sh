#!/usr/bin/env bash
# Keras fits a model without call() on one device, and refuses it under MirroredStrategy.
#
# Guess: a model with a train_step of its own, such as a GAN that holds two models, needs no call() anywhere, or everywhere.
# What happens: without a strategy fit traces train_step at once. Under a strategy it first builds the model with symbolic inputs,
# which calls it. All parts of the model have their weights already. The call is skipped if the model says that it is built.
# Why: `_maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py returns early without a strategy. `_symbolic_build` in
# keras/src/trainers/trainer.py calls a model with any layer whose `built` is False, and the outer model is one of its layers.
# Workaround: build the parts, then set `model.built = True` before fit.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: fit of a model with a train_step of its own and no call()
#     one device: fit trains
#     two replicas: RuntimeError: Unable to automatically build the model
#     two replicas, built=True: fit trains

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/fit.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf


class Pair(keras.Model):
    """Two models, as a GAN has them."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.second = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.second(self.first(x, training=True), training=True) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def fit(strategy, says_built):
    with strategy.scope():
        model = Pair()
        model.built = model.built or says_built
        model.compile("sgd")
    try:
        model.fit(np.ones((8, 3), "float32"), batch_size=4, verbose=0)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition('.')[0]}"
    return "fit trains"


parts = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print("one device:", fit(tf.distribute.get_strategy(), says_built=False))
print("two replicas:", fit(mirrored, says_built=False))
print("two replicas, built=True:", fit(mirrored, says_built=True))
PYTHON
expect_header "$(run_python fit.py)"
