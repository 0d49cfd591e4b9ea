#!/usr/bin/env bash
# On CPU a sum of 4,096 ones in float16 is 2,048 over the first axis and 4,096 over the last; a mean may be infinite.
#
# Guess: reductions of float16 and bfloat16 add in float32, so a mean that fits into the type is right, over whatever axis.
# What happens: float16 is added in float16. Over the last axis many partial sums hide it. Over the axis of the examples each column is
# one running sum: 2048 + 1 is 2048. So a share of right answers that is cast to float16 is 0.5 instead of 1, and a mean loss of 100 is
# inf. reduce_sum and reduce_mean of bfloat16 are right. unsorted_segment_sum, which makes the gradient of an Embedding dense, is wrong in
# both types: a token that occurs 4,096 times gets 256.
# Why: tensorflow/core/kernels/reduction_ops.h specializes `ReduceEigenImpl` for bfloat16 alone ("to fix accuracy"). The functors of
# tensorflow/core/kernels/segment_reduction_ops_impl.h add in the type of the data.
# Workaround: cast to float32 before a reduction. Keras's losses and metrics do; a loop of your own and tf.reduce_mean do not.
# Versions: TensorFlow 2.21.0
# Seen: of a tensor of 4,096 rows.
#     float16: sum over rows 2048, sum over columns 4096, mean of 1 over rows 0.5, mean of 100 over rows inf, segment sum 2048
#     bfloat16: sum over rows 4096, sum over columns 4096, mean of 1 over rows 1, mean of 100 over rows 100, segment sum 256

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1  # shares their environment
cat > "$work/sums.py" <<'PYTHON'
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)  # the sum over columns may have other parts with more
for dtype in (tf.float16, tf.bfloat16):
    ones = tf.ones((4096, 3), dtype)
    numbers = {
        "sum over rows": tf.reduce_sum(ones, axis=0)[0],
        "sum over columns": tf.reduce_sum(tf.transpose(ones), axis=1)[0],
        "mean of 1 over rows": tf.reduce_mean(ones, axis=0)[0],
        "mean of 100 over rows": tf.reduce_mean(100 * ones, axis=0)[0],
        "segment sum": tf.math.unsorted_segment_sum(ones, tf.zeros(4096, tf.int32), 1)[0, 0],
    }
    print(f"{dtype.name}:", ", ".join(f"{name} {float(number):g}" for name, number in numbers.items()))
PYTHON
expect_header "$(run_python sums.py)"
