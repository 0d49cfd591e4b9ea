#!/usr/bin/env bash
# tf_keras's Nadam makes too small steps in a tf.function, and the smaller the more variables come first.
#
# Guess: Nadam is Nadam: fit, run_eagerly=True and Keras 3 differ by rounding.
# What happens: in a tf.function, so in fit, the running product of the momentum schedule is multiplied once for nearly each variable, not
# once for each step. The later a variable comes, the smaller the product and its first steps: 40 % too small for the fourth of four.
# Eagerly, and in Keras 3, it is right.
# Why: `Nadam.update_step` in tf_keras/src/optimizers/nadam.py guards the product with `self._u_product_counter`, a Python integer: it
# counts traces, not steps, and both branches of the `tf.cond` are traced. Keras 3 has the product in `_backend_update_step`.
# Workaround: Keras 3's Nadam, or Adam.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, tf_keras 2.21.0
# Seen: the first and the last of four weights after one and after three steps with a gradient of 1, learning rate 1.
#     by hand: -1.063 -1.063 -2.548 -2.548
#     keras eager: -1.063 -1.063 -2.548 -2.548
#     keras tf.function: -1.063 -1.063 -2.548 -2.548
#     tf_keras eager: -1.063 -1.063 -2.548 -2.548
#     tf_keras tf.function: -1.063 -0.644 -2.344 -1.900

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0
cat > "$work/nadam.py" <<'PYTHON'
import keras
import tensorflow as tf
import tf_keras


def by_hand(steps):
    weight = momentum = velocity = 0.0
    product = 1.0
    schedule = [0.9 * (1 - 0.5 * 0.96**step) for step in range(1, steps + 2)]
    for step in range(steps):
        product *= schedule[step]
        momentum, velocity = 0.9 * momentum + 0.1, 0.999 * velocity + 0.001
        mean = schedule[step + 1] * momentum / (1 - product * schedule[step + 1]) + (1 - schedule[step]) / (1 - product)
        weight -= mean / ((velocity / (1 - 0.999 ** (step + 1))) ** 0.5 + 1e-7)
    return f"{weight:.3f} {weight:.3f}"


def trained(library, compiled, steps):
    weights = [tf.Variable(0.0) for _ in range(4)]
    optimizer = library.optimizers.Nadam(1.0)
    optimizer.build(weights)

    def step():
        optimizer.apply_gradients([(tf.constant(1.0), weight) for weight in weights])

    step = tf.function(step) if compiled else step
    for _ in range(steps):
        step()
    return f"{weights[0].numpy():.3f} {weights[-1].numpy():.3f}"


print("by hand:", by_hand(1), by_hand(3))
for library in (keras, tf_keras):
    for name, compiled in (("eager", False), ("tf.function", True)):
        print(f"{library.__name__} {name}:", trained(library, compiled, 1), trained(library, compiled, 3))
PYTHON
expect_header "$(run_python nadam.py)"
