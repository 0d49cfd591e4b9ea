#!/usr/bin/env bash
# keras.distillation.Distiller on four replicas trains with a gradient four times too large.
#
# Guess: Distiller is a Keras model, so its fit under MirroredStrategy trains what it trains on one device.
# What happens: each replica takes the mean of its own share and nothing divides by the number of replicas, while the optimizer sums. With a
# loss given as an object, that term alone is divided: then the balance between the labels and the teacher changes, too.
# Why: `Distiller.compute_loss` in keras/src/distillation/distiller.py replaces the method of `Trainer` and calls functions of
# keras.losses, which return the loss of each example, then `keras.ops.mean`. It never calls `scale_loss_for_distribution`, which is
# in `reduce_values` of keras/src/losses/loss.py. `TensorFlowTrainer.train_step` multiplies the reported loss by the replicas again.
# Workaround: give both the loss of `compile` and the loss of the distillation as objects: `keras.losses.MeanSquaredError()`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: update and reported loss of one step on four replicas, divided by those on one device; all replicas have the same examples.
#     labels alone, "mse": 4.0 4.0
#     teacher alone, "mse": 4.0 4.0
#     labels alone, MeanSquaredError(): 1.0 1.0
#     teacher alone, MeanSquaredError(): 1.0 1.0

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/train.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
draw = np.random.default_rng(0)
x = np.tile(draw.normal(size=(4, 3)), (4, 1)).astype("float32")
y = np.tile(draw.normal(size=(4, 2)), (4, 1)).astype("float32")


def step(replicas, weight, loss):
    reduce = tf.distribute.ReductionToOneDevice()
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce) if replicas > 1 else tf.distribute.get_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        teacher, student = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]) for _ in range(2))
        distill = keras.distillation.LogitsDistillation(temperature=1.0, loss=loss)
        model = keras.distillation.Distiller(teacher, student, distill, student_loss_weight=weight)
        model.compile(keras.optimizers.SGD(0.1), loss=loss)
    before = student.layers[0].kernel.numpy()
    reported = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history["loss"][0]
    return np.abs(student.layers[0].kernel.numpy() - before).sum(), reported


for shown, loss in (('"mse"', "mse"), ("MeanSquaredError()", keras.losses.MeanSquaredError())):
    for name, weight in (("labels", 1.0), ("teacher", 0.0)):
        one, four = step(1, weight, loss), step(4, weight, loss)
        print(f"{name} alone, {shown}: {four[0] / one[0]:.1f} {four[1] / one[1]:.1f}")
PYTHON
expect_header "$(run_python train.py)"
