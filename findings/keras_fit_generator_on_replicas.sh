#!/usr/bin/env bash
# Keras's fit with a Python generator never trains on some batches of the first epoch, once a strategy has two replicas.
#
# TensorFlow 2.21.0, Keras 3.15.1, two logical CPUs, MirroredStrategy. One endless generator yields batches 0 to 7 again and again,
# steps_per_epoch is 8. On one device the two epochs are 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7. On two replicas the first epoch begins
# with 0 1 and goes on several batches later, so that batches in between are lost: here 0 1 5 6 7 0 1 2, then 3 4 5 6 7 0 1 2.
#
# Why: under a strategy fit first takes a batch to build the model and its metrics (TensorFlowTrainer._maybe_symbolic_build), with
# an iterator of its own over the distributed dataset, which reads ahead. The epoch then begins with a new iterator; GeneratorDataAdapter
# gives it the two batches that it has peeked at, and then what is left of the same generator. How far was read ahead may vary.
# A tf.data.Dataset, arrays and a PyDataset begin anew with each iterator, and lose nothing.
#
# Fails if no batch is lost on two replicas, or if one is lost on one device.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorflow==2.21.0 keras==3.15.1
cat > "$work/order.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

replicas = int(sys.argv[1])
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
devices = [f"CPU:{number}" for number in range(replicas)]
reduce = tf.distribute.ReductionToOneDevice()
strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
seen = []


class Network(keras.Sequential):
    def train_step(self, data):
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(tf.cast(context.replica_id_in_sync_group, tf.int32), 0)
        number = tf.where(is_first, tf.cast(data[0][0, 0], tf.int32), -1)
        tf.py_function(lambda value: seen.append(int(value)) if value >= 0 else None, [number], [])
        return super().train_step(data)


with strategy.scope():
    model = Network([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


def batches():
    while True:
        for number in range(8):
            yield np.full((4, 1), number, "float32"), np.zeros((4, 1), "float32")


model.fit(batches(), steps_per_epoch=8, epochs=2, verbose=0)
print(*seen[:16])
PYTHON
export TF_CPP_MIN_LOG_LEVEL=3
one=$("$work/venv/bin/python" "$work/order.py" 1 2> /dev/null)
two=$("$work/venv/bin/python" "$work/order.py" 2 2> /dev/null)
echo "one device:   $one"
echo "two replicas: $two"
[ "$one" = "0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7" ] || { echo "One device has another order now." >&2; exit 1; }
lost=$(comm -23 <(seq 0 7 | sort) <(tr ' ' '\n' <<< "$two" | head -n 6 | sort) | wc -l)
[ "$lost" -gt 2 ] || { echo "The first six steps on two replicas have six different batches in order now." >&2; exit 1; }
