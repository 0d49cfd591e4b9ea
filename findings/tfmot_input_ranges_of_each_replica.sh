#!/usr/bin/env bash
# Quantization-aware training on four replicas: the saved model clips inputs to the range that the first replica saw.
#
# Guess: the ranges that quantize_model learns are joined over the replicas, for the inputs as for the activations.
# What happens: the ranges of weights and activations are equal on all replicas. The ranges of the inputs are not: each replica has the
# smallest and the largest value of its own share of the batches. A prediction depends on the place of the example in the batch.
# The saved model has the range of the first replica, so it clips each input that is larger than any that this replica saw.
# Why: `AllValuesQuantize` in tensorflow_model_optimization/python/core/quantization/keras/quant_ops.py assigns the local minimum and
# maximum to variables of `AllValuesQuantizer.build` in quantizers.py, which have no aggregation. The ranges of activations go
# through assign_moving_average, which takes the mean over the replicas.
# Workaround: load the weights on one device, and call the model on the training data with training=True.
# Versions: TensorFlow 2.21.0, tf_keras 2.21.0, tensorflow-model-optimization 0.8.1
# Seen: the first quarter of each batch lies in -1 to 1, the rest in -10 to 10. The upper ends of the ranges on each replica, and the
# answers for one example of tens, which is in a batch four times.
#     one device: inputs 10, activations equal, answers equal
#     four replicas: inputs 1 10 10 10, activations equal, answers different; saved model: inputs 1, after a call with training=True 10

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 tf_keras==2.21.0 tensorflow-model-optimization==0.8.1
export TF_USE_LEGACY_KERAS=1
cat > "$work/quantize.py" <<'PYTHON'
import sys

import numpy as np
import tensorflow as tf
import tensorflow_model_optimization as tfmot
import tf_keras as keras

replicas, weights = int(sys.argv[1]), sys.argv[2]
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
reduce = tf.distribute.ReductionToOneDevice()
devices = [f"CPU:{number}" for number in range(replicas)]
strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
x = draw.uniform(-10, 10, size=(16, 3)).astype("float32")
x[::4] = 10  # each share of four has the largest value
x[:4] /= 10
y = x.sum(axis=1, keepdims=True)


def build():
    model = keras.Sequential([keras.layers.Dense(4, "relu", input_shape=(3,)), keras.layers.Dense(1)])
    return tfmot.quantization.keras.quantize_model(model)


def upper_ends(model, name):
    (variable,) = (variable for variable in model.variables if name in variable.name)
    return [float(copy.numpy()) for copy in strategy.experimental_local_results(variable)]


def are(values):
    return "equal" if len(set(values)) == 1 else "different"


with strategy.scope():
    model = build()
    model.compile(keras.optimizers.SGD(0.001), "mse")
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
inputs = upper_ends(model, "quantize_layer_max")
activations = upper_ends(model, "dense_1/post_activation_max")
answers = model.predict(np.full((4, 3), 10, "float32"), verbose=0).ravel()
model.save_weights(weights)
loaded = build()
loaded.load_weights(weights)
(saved,) = upper_ends(loaded, "quantize_layer_1_max")
loaded(x, training=True)
(mended,) = upper_ends(loaded, "quantize_layer_1_max")
after = f"; saved model: inputs {saved:.0f}, after a call with training=True {mended:.0f}" if replicas > 1 else ""
ends = " ".join(f"{end:.0f}" for end in inputs)
print(f"inputs {ends}, activations {are(activations)}, answers {are(answers.tolist())}{after}")
PYTHON
one=$(run_python quantize.py 1 "$work/one.weights.h5")
four=$(run_python quantize.py 4 "$work/four.weights.h5")
expect_header "one device: $one"$'\n'"four replicas: $four"
