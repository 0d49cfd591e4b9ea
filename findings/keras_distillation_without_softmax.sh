#!/usr/bin/env bash
# LogitsDistillation's default compares raw logits: no softmax, and no gradient for a negative logit.
#
# Guess: LogitsDistillation() is Hinton's loss: KL(softmax(teacher / T), softmax(student / T)), times T squared.
# What happens: that is so only if the loss is an object, `loss=keras.losses.KLDivergence()`. The default, the string "kl_divergence", gives
# the logits themselves to the divergence, which clips them to 1e-7 to 1. So two sets of negative logits are equal, whatever they are,
# and the student gets no gradient from them.
# Why: `_convert_loss_to_function` in keras/src/distillation/distillation_loss.py turns the string into the function `kl_divergence`.
# `LogitsDistillation.compute_loss` takes the softmax and the factor only if `isinstance(loss_fn, keras.losses.KLDivergence)`.
# Workaround: `LogitsDistillation(temperature, loss=keras.losses.KLDivergence())`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: for teacher's logits -1 -2 -9 and student's logits -9 -2 -1, at temperature 2, the loss and its gradient for the student.
#     default: loss 0.000 gradient 0.000 0.000 0.000
#     object: loss 9.667 gradient -1.208 0.000 1.208
#     by hand: loss 9.667 gradient -1.208 0.000 1.208

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/loss.py" <<'PYTHON'
import keras
import tensorflow as tf


def by_hand(teacher, student):
    wanted, given = tf.nn.softmax(teacher / 2), tf.nn.softmax(student / 2)
    return 4 * tf.reduce_sum(wanted * tf.math.log(wanted / given))


for name, loss in (
    ("default", keras.distillation.LogitsDistillation(2.0).compute_loss),
    ("object", keras.distillation.LogitsDistillation(2.0, loss=keras.losses.KLDivergence()).compute_loss),
    ("by hand", by_hand),
):
    teacher, student = tf.constant([[-1.0, -2.0, -9.0]]), tf.constant([[-9.0, -2.0, -1.0]])
    with tf.GradientTape() as tape:
        tape.watch(student)
        value = loss(teacher, student)
    gradient = " ".join(f"{float(part) + 0.0:.3f}" for part in tape.gradient(value, student)[0])
    print(f"{name}: loss {float(value):.3f} gradient {gradient}")
PYTHON
expect_header "$(run_python loss.py)"
