#!/usr/bin/env bash
# With oneDNN, the default on newer x86 CPUs, a convolution of 0 examples has the shape of its input: (0, 8, 8, 1), not (0, 6, 6, 4).
#
# Guess: an empty batch is a batch: the result has no rows, and the height, width and channels of any other.
# What happens: Conv2D and DepthwiseConv2dNative have the shape of what they got. The function's own static shape says (None, 6, 6, 4).
# A strategy gives such a batch to a replica when the last batch has fewer examples than there are replicas. The step then fails far from
# the cause: ReluGrad gets two shapes, a bias does not fit the channels, BatchNormalization misses its axis. Pooling, matrix products and
# normalization keep their shapes, and so do all kernels without oneDNN, and GPUs: the same program runs there.
# Why: for a result without elements tensorflow/core/kernels/mkl/mkl_conv_ops.cc allocates `src_tf_shape`, and not `dst_tf_shape`.
# Workaround: TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported, or drop_remainder=True.
# Versions: TensorFlow 2.21.0
# Seen: of a batch of 0 examples of 8 x 8.
#     oneDNN 0: traced (None, 6, 6, 4), convolution (0, 6, 6, 4), depthwise (0, 6, 6, 4), maximum (0, 4, 4, 4), normalization (0, 8, 8, 4)
#     oneDNN 1: traced (None, 6, 6, 4), convolution (0, 8, 8, 1), depthwise (0, 8, 8, 4), maximum (0, 4, 4, 4), normalization (0, 8, 8, 4)

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1  # shares their environment
cat > "$work/shapes.py" <<'PYTHON'
import os

import tensorflow as tf


def shape(operation, channels):
    function = tf.function(operation, input_signature=[tf.TensorSpec([None, 8, 8, channels])])
    return tuple(function.get_concrete_function().structured_outputs.shape), tuple(function(tf.zeros([0, 8, 8, channels])).shape)


traced, convolution = shape(lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 1, 4]), 1, "VALID"), 1)
_, depthwise = shape(lambda x: tf.nn.depthwise_conv2d(x, tf.ones([3, 3, 4, 1]), [1] * 4, "VALID"), 4)
_, maximum = shape(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), 4)
_, normalization = shape(lambda x: tf.raw_ops.FusedBatchNormV3(
    x=x, scale=tf.ones(4), offset=tf.zeros(4), mean=tf.zeros(4), variance=tf.ones(4), is_training=True).y, 4)
print(f"oneDNN {os.environ['TF_ENABLE_ONEDNN_OPTS']}: traced {traced}, convolution {convolution}, depthwise {depthwise}, "
      f"maximum {maximum}, normalization {normalization}")
PYTHON
expect_header "$(for on in 0 1; do TF_ENABLE_ONEDNN_OPTS=$on run_python shapes.py; done)"
