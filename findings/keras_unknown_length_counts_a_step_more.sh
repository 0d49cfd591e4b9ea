#!/usr/bin/env bash
# On data of unknown length Keras's fit counts one optimizer step more in each epoch, and replicas disagree about it for a moment.
#
# TensorFlow 2.21.0, Keras 3.15.1. After filter, unbatch or from_generator fit learns that an epoch is over by a step that ends in
# OutOfRange. By then the step's graph has counted optimizer.iterations, which depends on no data. So two epochs of 4 batches are
# 10 iterations, and each schedule, warm-up and bias correction of Adam is ahead of the steps that were made; with a dataset of
# known length they are 8. keras.optimizers.Nadam and Adam train another model from the second epoch on.
#
# With MirroredStrategy each replica counts for itself, and the function returns its error before all of them have: at the end of
# about one epoch in twenty the copies of iterations differ (four logical CPUs; more on a busy machine), and the next step of the
# late replica reads the old count. Then the replicas' weights differ for good.
#
# Fails if the counts are those of the steps, or if in 150 epochs the replicas never disagree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorflow==2.21.0 keras==3.15.1
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
        apart.append(len({int(count) for count in copies(self.model.optimizer.iterations.value)}) > 1)


model.fit(data, epochs=epochs, verbose=0, callbacks=[Look()])
kernels = copies(model.layers[0].kernel.value)
same = all(np.array_equal(kernels[0], kernel) for kernel in kernels)
print(int(copies(model.optimizer.iterations.value)[0]), "yes" if any(apart) else "no", "equal" if same else "different")
PYTHON
export TF_CPP_MIN_LOG_LEVEL=3
known=$("$work/venv/bin/python" "$work/counts.py" 1 2 known 2> /dev/null)
unknown=$("$work/venv/bin/python" "$work/counts.py" 1 2 unknown 2> /dev/null)
many=$("$work/venv/bin/python" "$work/counts.py" 4 150 unknown 2> /dev/null)
echo "iterations of 8 steps, known length:   $known"
echo "iterations of 8 steps, unknown length: $unknown"
echo "4 replicas, 150 epochs: iterations, ever apart, weights: $many"
[ "$known" = "8 no equal" ] || { echo "Known lengths are counted otherwise now." >&2; exit 1; }
[ "$unknown" = "10 no equal" ] || { echo "Unknown lengths are counted otherwise now." >&2; exit 1; }
[ "$many" = "750 yes different" ] || { echo "Replicas agree about the count now." >&2; exit 1; }
