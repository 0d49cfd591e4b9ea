#!/usr/bin/env bash
# On data of unknown length Keras's fit counts one optimizer step more in each epoch, and replicas disagree about it for a moment.
#
# Guess: optimizer.iterations counts the updates that were made, and is equal on all replicas.
# What happens: after filter, unbatch or from_generator each epoch counts one more, so each schedule, warm-up and bias correction is ahead of
# the updates. With MirroredStrategy each replica counts for itself. At the end of about one epoch in twenty the copies differ, the
# next step of the late replica reads the old count, and then the replicas' weights differ for good.
# Why: fit learns that an epoch is over by a step that ends in OutOfRange (`TensorFlowTrainer.fit` and `_make_function` in
# keras/src/backend/tensorflow/trainer.py). By then the step's graph has run `self._iterations.assign_add(1)` of `BaseOptimizer.apply`,
# which depends on no data.
# Workaround: `dataset.apply(tf.data.experimental.assert_cardinality(number))`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: iterations of two epochs of 4 batches; then of up to 150 epochs on four replicas, which end behind the first disagreement.
#     known length: 4 an epoch, ever apart: no, weights: equal
#     unknown length: 5 an epoch, ever apart: no, weights: equal
#     4 replicas: 5 an epoch, ever apart: yes, weights: different

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/counts.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

replicas, epochs, is_known = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "known"
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
reduce = tf.distribute.ReductionToOneDevice()
devices = [f"CPU:{number}" for number in range(replicas)]
strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
keras.utils.set_random_seed(3)
x = np.random.default_rng(3).normal(size=(96, 6)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
data = (data if is_known else data.filter(lambda row, label: True)).batch(24)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Nadam(0.01), "mse")
copies = lambda variable: [copy.numpy() for copy in strategy.experimental_local_results(variable)]
apart = []


class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = any(apart)  # an epoch after the first disagreement
        apart.append(len({int(count) for count in copies(self.model.optimizer.iterations.value)}) > 1)


model.fit(data, epochs=epochs, verbose=0, callbacks=[Look()])
kernels = copies(model.layers[0].kernel.value)
same = all(np.array_equal(kernels[0], kernel) for kernel in kernels)
counted = int(copies(model.optimizer.iterations.value)[0]) / len(apart)
print(f"{counted:.0f} an epoch, ever apart: {'yes' if any(apart) else 'no'}, weights: {'equal' if same else 'different'}")
PYTHON
known=$(run_python counts.py 1 2 known)
unknown=$(run_python counts.py 1 2 unknown)
many=$(run_python counts.py 4 150 unknown)
expect_header "known length: $known"$'\n'"unknown length: $unknown"$'\n'"4 replicas: $many"
