#!/usr/bin/env bash
# XLA loses digits of the variance of a fused batch normalization: BatchNormalization of tf_keras with jit_compile=True.
#
# Guess: XLA adds numbers in another order, so a compiled step differs from a plain one in the last digits.
# What happens: for features far from 0 the variance of a batch is wrong in its first digits under XLA, or negative: on one CPU 1.00 instead of
# 0.95 for a mean of 1000, and -2.00 for a mean of 3000. Temperatures in Kelvin, pressures in pascal and times are such features. The layer
# normalizes with it, which gives NaN where it is negative, and keeps it in its moving variance. Keras 3 agrees with and without XLA.
# Why: XLA's BatchNormExpander computes the variance as the mean of the squares minus the square of the mean, two large numbers that are
# almost equal (tensorflow#118701). TensorFlow's own kernel of FusedBatchNormV3 subtracts the mean first. tf_keras uses that operation for
# inputs of four dimensions, Keras 3 uses `tf.nn.moments`.
# Workaround: subtract a constant near the mean of the features before the layer, or give the layer `fused=False`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, tf_keras 2.21.0
# Seen: moving variance after one batch (momentum 0) of features with a standard deviation of 1, by their mean: under XLA beside plain.
#     tf_keras, mean 0: the same within 1 %
#     tf_keras, mean 10000: off by more than 1 %
#     tf_keras, fused=False, mean 0: the same within 1 %
#     tf_keras, fused=False, mean 10000: the same within 1 %
#     keras, mean 0: the same within 1 %
#     keras, mean 10000: the same within 1 %

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0
cat > "$work/train.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf
import tf_keras

draw = np.random.default_rng(0).normal(size=(64, 4, 4, 1)).astype("float32")


def variance(layer, mean, xla):
    layer.build((None, 4, 4, 1))
    tf.function(lambda x: layer(x, training=True), jit_compile=xla)(tf.constant(draw + mean))
    return float(np.asarray(layer.moving_variance)[0])


for name, library, options in (("tf_keras", tf_keras, {}), ("tf_keras, fused=False", tf_keras, {"fused": False}), ("keras", keras, {})):
    for mean in (0, 10000):
        plain, xla = (variance(library.layers.BatchNormalization(momentum=0.0, **options), mean, on) for on in (False, True))
        print(f"{name}, mean {mean}: {'the same within 1 %' if abs(xla - plain) < 0.01 * plain else 'off by more than 1 %'}")
PYTHON
expect_header "$(run_python train.py)"
