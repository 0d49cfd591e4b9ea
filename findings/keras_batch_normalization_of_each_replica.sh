#!/usr/bin/env bash
# After Keras 3's fit on two replicas, what model.predict says of an example depends on its place in the batch.
#
# Guess: the moving statistics of BatchNormalization are joined over the replicas, as in tf_keras, so predict is a function of the
# example.
# What happens: each replica keeps the statistics of its own half of each batch, and nothing ever joins them. In evaluate and predict each
# replica normalizes with its own. Saved weights are those of the first replica, so a model that is loaded says something else again.
# Why: `BatchNormalization.build` in keras/src/layers/normalization/batch_normalization.py creates moving_mean and moving_variance
# without an aggregation. In tf_keras the same layer asks for `VariableAggregation.MEAN`.
# Workaround: `BatchNormalization(synchronized=True)`, on input without a mask.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the first half of each batch lies around 0, the other half around 10. One example is asked about twice in a batch of two.
#     one device: moving means 5 answers equal
#     two replicas: moving means 0 10 answers different

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
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
one=$(run_python answers.py 1)
two=$(run_python answers.py 2)
expect_header "one device: $one"$'\n'"two replicas: $two"
