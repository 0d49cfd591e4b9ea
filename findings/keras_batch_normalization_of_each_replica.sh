#!/usr/bin/env bash
# After Keras 3's fit on two replicas, what model.predict says of an example depends on its place in the batch.
#
# TensorFlow 2.21.0, Keras 3.15.1, two logical CPUs, MirroredStrategy. BatchNormalization creates its moving mean and variance
# without an aggregation, so each replica keeps the statistics of its own half of each batch; nothing ever joins them. In
# tf_keras the same layer asks for a mean over the replicas. In evaluate and predict each replica then normalizes with its own
# statistics. Weights that are saved are those of the first replica, so a model that is loaded says something else again.
#
# Data: the first half of each batch lies around 0, the other half around 10. Seen: the moving means are near 0 and near 10, and
# one example that is asked about twice in one batch of two, once on each replica, gets two different answers, which it does not
# on one device.
#
# Fails if the replicas' moving means agree, or if the two answers do.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorflow==2.21.0 keras==3.15.1
cat > "$work/answers.py" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

replicas = int(sys.argv[1])
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
reduce = tf.distribute.ReductionToOneDevice()
devices = [f"CPU:{number}" for number in range(replicas)]
strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 4)).astype("float32")
x += np.where(np.arange(64) % 16 < 8, 0.0, 10.0).astype("float32")[:, None]  # batches of 16, of which replica 1 has the last 8
with strategy.scope():
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
model.fit(x, np.zeros_like(x), batch_size=16, epochs=4, shuffle=False, verbose=0)
means = [float(copy.numpy().mean()) for copy in strategy.experimental_local_results(layer.moving_mean.value)]
one, other = model.predict(np.repeat(x[:1], 2, axis=0), batch_size=2, verbose=0)
print("moving means", *(round(mean) for mean in means), "answers", "equal" if np.allclose(one, other, atol=1e-5) else "different")
PYTHON
export TF_CPP_MIN_LOG_LEVEL=3
one=$("$work/venv/bin/python" "$work/answers.py" 1 2> /dev/null)
two=$("$work/venv/bin/python" "$work/answers.py" 2 2> /dev/null)
echo "one device:   $one"
echo "two replicas: $two"
[ "$one" = "moving means 5 answers equal" ] || { echo "One device answers otherwise now." >&2; exit 1; }
[ "$two" = "moving means 0 10 answers different" ] || { echo "Replicas keep other statistics now." >&2; exit 1; }
