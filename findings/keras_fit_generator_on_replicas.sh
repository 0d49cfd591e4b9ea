#!/usr/bin/env bash
# Keras's fit with a Python generator never trains on some batches of the first epoch, once a strategy has two replicas.
#
# Guess: fit takes the batches of a generator in order, each one once, on one device and on two.
# What happens: on two replicas the first epoch begins with the first two batches and goes on several batches later. Those in between are
# lost. How many is a matter of timing. A tf.data.Dataset, arrays and a PyDataset lose nothing.
# Why: `TensorFlowTrainer._maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py takes a batch to build the model, with an
# iterator of its own over the distributed dataset, which reads ahead. The epoch begins with a new iterator: GeneratorDataAdapter in
# keras/src/trainers/data_adapters/generator_data_adapter.py gives it the batches that it peeked at, then what is left.
# Workaround: `tf.data.Dataset.from_generator`, or a keras.utils.PyDataset.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the numbers of the batches of two epochs of 8 steps; one endless generator yields batches 0 to 7 again and again.
#     one device: 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7
#     two replicas: 0 1 5 6 7 0 1 2 3 4 5 6 7 0 1 2

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
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
one=$(run_python order.py 1)
two=$(run_python order.py 2)
echo "one device: $one"
echo "two replicas: $two"
[ "$one" = "0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7" ] || { echo "One device has another order now." >&2; exit 1; }
lost=$(comm -23 <(seq 0 7 | sort) <(tr ' ' '\n' <<< "$two" | head -n 6 | sort) | wc -l)
[ "$lost" -gt 2 ] || { echo "The first six steps on two replicas have six different batches in order now." >&2; exit 1; }
