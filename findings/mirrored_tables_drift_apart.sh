#!/usr/bin/env bash
# MirroredStrategy lets the replicas' copies of an embedding table drift apart: each sums the rows of the sparse gradient in an order of its own.
#
# Guess: mirrored variables are the same on all replicas, bit for bit, as each replica applies the same all-reduced gradients.
# What happens: sparse gradients (tf.IndexedSlices) are not added up by the all-reduce but gathered. Each replica's optimizer adds up the
# rows that name the same row of the table (`tf.math.unsorted_segment_sum`, or a scatter into the variable), and its threads do so in any
# order. Where many examples share a row (padding), copies differ from the first steps on; later gradients are taken at other weights, and
# RMSprop divides by numbers that are rounding themselves. With a padded text and RMSprop it is 1e-5 after ten steps, with SGD 1e-8. Dense
# variables stay equal. Nothing compares the copies; a checkpoint has the first one, so a run that is restored goes on from others.
# Why: `_all_reduce_sum_gradients` in keras/src/backend/tensorflow/optimizer.py gives IndexedSlices to `all_reduce`, which concatenates them;
# UnsortedSegmentSum and ResourceScatterAdd on CPU split their input over threads.
# Workaround: tf.config.experimental.enable_op_determinism(), which makes both sums in one order.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: copies of the table after ten steps on two replicas, the other variables, and the table with determinism.
#     table: differs
#     other variables: equal
#     table, deterministic: equal

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/table.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

if "deterministic" in sys.argv:
    tf.config.experimental.enable_op_determinism()
tf.config.threading.set_intra_op_parallelism_threads(4)
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
texts = random.integers(1, 10_000, size=(1280, 500)).astype("int32")
texts[:, :450] = 0  # padding
labels = random.integers(0, 2, size=1280).astype("float32")
with strategy.scope():
    table = keras.layers.Embedding(10_000, 32)
    layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1, activation="sigmoid")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.RMSprop(), "binary_crossentropy")
model.fit(texts, labels, batch_size=128, shuffle=False, verbose=0)


def is_equal(variable):
    first, second = (copy.numpy() for copy in strategy.experimental_local_results(variable.value))
    return np.array_equal(first, second)


word = {True: "equal", False: "differs"}
if "deterministic" in sys.argv:
    print("table, deterministic:", word[is_equal(table.embeddings)])
else:
    print("table:", word[is_equal(table.embeddings)])
    print("other variables:", word[all(is_equal(v) for v in model.trainable_variables if v is not table.embeddings)])
PYTHON
expect_header "$(run_python table.py)"$'\n'"$(run_python table.py deterministic)"
