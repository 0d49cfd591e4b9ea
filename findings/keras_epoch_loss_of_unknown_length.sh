#!/usr/bin/env bash
# Keras's fit divides an epoch's loss by a batch too many, if the data's length is unknown and the remainder of a batch is dropped.
#
# Guess: the loss in the history is the mean over the examples of the epoch, which the last batch has logged before.
# What happens: after filter, unbatch, from_generator or TFRecordDataset, batched with drop_remainder=True, the history of 8 batches has 8/9
# of the loss that the last batch logged, and so has evaluate's result. On 4 replicas one to four of them count so, by chance: a loss
# that is compared between numbers of replicas differs though the training is the same. EarlyStopping and ReduceLROnPlateau see it.
# Without drop_remainder, or with a known length, the loss is right.
# Why: fit learns that an epoch is over by a step that ends in OutOfRange (keras/src/backend/tensorflow/trainer.py). If the graph knows the
# size of a batch, adding it to the count of the loss's `Mean` depends on no data: the step that has none still adds it.
# Workaround: `dataset.apply(tf.data.experimental.assert_cardinality(number))`, or batch without drop_remainder.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the last batch's log, the history's loss, and evaluate's; 96 examples in 8 batches.
#     no strategy, known, dropped: 47.50, 47.50, 47.50
#     no strategy, unknown, kept: 47.50, 47.50, 47.50
#     no strategy, unknown, dropped: 47.50, 42.22, 42.22
#     4 replicas, known, dropped: 47.50, 47.50, 47.50
#     4 replicas, unknown, dropped: 47.50, less, less

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/losses.py" <<'PYTHON'
import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf

replicas, length, remainder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(1, replicas))
names = [device.name for device in tf.config.list_logical_devices("CPU")]
with tf.distribute.MirroredStrategy(names).scope() if replicas else contextlib.nullcontext():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
data = tf.data.Dataset.from_tensor_slices((np.arange(96, dtype="float32")[:, None], np.zeros((96, 1), "float32")))
if length == "unknown":
    data = data.filter(lambda x, y: True)
data = data.batch(12, drop_remainder=remainder == "dropped")
logged = []
of_batch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logged.append(float(logs["loss"])))
(loss,) = model.fit(data, epochs=1, verbose=0, callbacks=[of_batch]).history["loss"]
ends = [loss, model.evaluate(data, verbose=0)]
# How many of the replicas count so is a matter of time.
shown = ["less" if replicas and loss < 47.4 else f"{loss:.2f}" for loss in ends]
print(f"{f'{replicas} replicas' if replicas else 'no strategy'}, {length}, {remainder}: {logged[-1]:.2f}, {', '.join(shown)}")
PYTHON
expect_header "$(
    run_python losses.py 0 known dropped
    run_python losses.py 0 unknown kept
    run_python losses.py 0 unknown dropped
    run_python losses.py 4 known dropped
    run_python losses.py 4 unknown dropped
)"
