#!/usr/bin/env bash
# Keras 3's Adam moves the embedding of a token that occurs four times in a batch twice as far, and clipnorm=1 lets more than 1 pass.
#
# Guess: the gradient of an Embedding is sparse for speed alone: optimizers see the sum for each row, as they would see a dense one.
# What happens: the gradient has one entry for each occurrence. Keras 3 squares them apart, so Adam's second moment has the sum of squares, not
# the square of the sum: a row that occurs k times moves sqrt(k) times too far. RMSprop, Adagrad and all that square do the same; Lion
# takes signs apart. Norms are those of the entries, too, so clipnorm clips too little. In tf_keras only the norm is wrong.
# Why: `elementwise_unary` in keras/src/backend/tensorflow/sparse.py applies `ops.square` to `IndexedSlices.values`. In tf_keras
# `Optimizer.apply_gradients` of tf_keras/src/optimizers/optimizer.py calls `_deduplicate_sparse_grad`, after it has clipped.
# Workaround: a train_step that applies `[tf.convert_to_tensor(gradient) for gradient in gradients]`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, tf_keras 2.21.0
# Seen: a batch has token 0 four times, token 1 once. Updates of the two rows by Adam(0.1); norm of the update by SGD(1.0, clipnorm=1).
#     keras: Adam 0.20 0.10, clipped norm 1.84
#     tf_keras: Adam 0.10 0.10, clipped norm 1.84
#     keras, dense gradient: Adam 0.10 0.10, clipped norm 1.00

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0
cat > "$work/rows.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf
import tf_keras

tokens = tf.constant([[0], [0], [1], [0], [0]])


def update(library, dense, make_optimizer):
    layer = library.layers.Embedding(2, 1)
    layer.build((None, 1))
    before = layer.get_weights()[0]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tokens))
    (gradient,) = tape.gradient(loss, layer.trainable_variables)
    gradient = tf.convert_to_tensor(gradient) if dense else gradient
    make_optimizer(library.optimizers).apply_gradients([(gradient, layer.trainable_variables[0])])
    return (before - layer.get_weights()[0]).ravel()


for name, library, dense in (("keras", keras, False), ("tf_keras", tf_keras, False), ("keras, dense gradient", keras, True)):
    often, once = update(library, dense, lambda optimizers: optimizers.Adam(0.1))
    norm = np.linalg.norm(update(library, dense, lambda optimizers: optimizers.SGD(1.0, clipnorm=1.0)))
    print(f"{name}: Adam {often:.2f} {once:.2f}, clipped norm {norm:.2f}")
PYTHON
expect_header "$(run_python rows.py)"
