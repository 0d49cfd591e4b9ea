#!/usr/bin/env bash
# A loss that returns one number is not divided by the replicas: fit trains with a gradient N times too large.
#
# Guess: model.fit scales the loss for the strategy, whatever the loss function returns. tf_keras does.
# What happens: Keras 3 divides by the number of replicas only while it reduces a loss of one value for each example. A loss function that
# ends with a mean over the batch, and the built-in Dice and Tversky, return a scalar. On four replicas the gradient is then four times
# too large. So is the loss in the history. With Adam only the history shows it.
# Why: `reduce_values` in keras/src/losses/loss.py returns a value of shape () as it is, before `scale_loss_for_distribution` (of keras#20609).
# `_all_reduce_sum_gradients` in keras/src/backend/tensorflow/optimizer.py then sums the gradients of the replicas.
# Workaround: return one value for each example, `ops.mean(..., axis=-1)`. For Dice and Tversky give `axis` without the batch's axis.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, tf_keras 2.21.0
# Seen: update and reported loss of one step on four replicas, divided by those on one device; all replicas have the same examples.
#     keras scalar function: 4.0 4.0
#     keras function of each example: 1.0 1.0
#     keras Dice: 4.0 4.0
#     tf_keras scalar function: 1.0 1.0

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0
cat > "$work/train.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf
import tf_keras

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
draw = np.random.default_rng(0)
x = np.tile(draw.normal(size=(4, 3)), (4, 1)).astype("float32")
y = np.tile(draw.integers(0, 2, size=(4, 2)), (4, 1)).astype("float32")


def step(library, loss, replicas):
    reduce = tf.distribute.ReductionToOneDevice()
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
    library.utils.set_random_seed(0)
    with strategy.scope():
        model = library.Sequential([library.layers.Dense(2, "sigmoid")])
        model.build((None, 3))
        model.compile(library.optimizers.SGD(0.1), loss)
    before = model.layers[0].kernel.numpy()
    reported = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history["loss"][0]
    return np.abs(model.layers[0].kernel.numpy() - before).sum(), reported


def scalar(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2)


def of_each_example(y_true, y_pred):
    return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)


for name, library, loss in (
    ("keras scalar function", keras, scalar),
    ("keras function of each example", keras, of_each_example),
    ("keras Dice", keras, keras.losses.Dice()),
    ("tf_keras scalar function", tf_keras, scalar),
):
    one, four = step(library, loss, 1), step(library, loss, 4)
    print(f"{name}: {four[0] / one[0]:.1f} {four[1] / one[1]:.1f}")
PYTHON
expect_header "$(run_python train.py)"
