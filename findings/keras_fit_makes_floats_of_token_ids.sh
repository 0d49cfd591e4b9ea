#!/usr/bin/env bash
# Keras's fit first gives a model floats under MirroredStrategy, where the program gives it integers.
#
# Guess: token ids of int32 reach call() of a model as int32, on one device and under a strategy.
# What happens: under a strategy fit first calls the model with float32 in place of int32. tf.gather and tf.one_hot refuse that, so fit
# fails. A call of the model before fit does not help if the model is compiled with a loss.
# Why: `_maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py takes the mean of the replicas' batches to learn its shape
# and dtype: `strategy.reduce("MEAN", ...)` gives float64 for int32. The model then casts floats to its own dtype.
# Workaround: cast the ids in call(), tf.cast(tokens, tf.int32), or look them up with keras.layers.Embedding, which casts them.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: dtypes that call() gets of int32 token ids, and how fit ends
#     mean over two replicas: float64
#     one device: int32, fit trains
#     two replicas: float32, RuntimeError: Unable to automatically build the model
#     two replicas, called before fit: float32, RuntimeError: Unable to automatically build the model
#     two replicas, cast in call(): float32 int32, fit trains

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/fit.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf

TOKENS = np.arange(24, dtype="int32").reshape(8, 3) % 10
TARGETS = np.ones((8, 4), "float32")


class Words(keras.Model):
    """A mean of word vectors."""

    def __init__(self, casts):
        super().__init__()
        self.casts, self.seen = casts, []
        self.table = self.add_weight(shape=(10, 4), name="table")

    def call(self, tokens):
        self.seen.append(tokens.dtype.name)
        tokens = tf.cast(tokens, tf.int32) if self.casts else tokens
        return tf.reduce_mean(tf.gather(self.table, tokens), axis=1)


def fit(strategy, *, calls=False, casts=False):
    with strategy.scope():
        model = Words(casts)
        model.compile("sgd", "mse")
    if calls:
        model(TOKENS)
        model.seen.clear()
    try:
        model.fit(TOKENS, TARGETS, batch_size=4, verbose=0)
        end = "fit trains"
    except RuntimeError as error:
        end = f"{type(error).__name__}: {str(error).partition('.')[0]}"
    return f"{' '.join(dict.fromkeys(model.seen))}, {end}"


parts = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
ids = mirrored.experimental_distribute_values_from_function(lambda _: tf.constant([1, 2]))
print("mean over two replicas:", mirrored.reduce("MEAN", ids, axis=None).dtype.name)
print("one device:", fit(tf.distribute.get_strategy()))
print("two replicas:", fit(mirrored))
print("two replicas, called before fit:", fit(mirrored, calls=True))
print("two replicas, cast in call():", fit(mirrored, casts=True))
PYTHON
expect_header "$(run_python fit.py)"
