#!/usr/bin/env bash
# The graph of a loss has other operations for a large batch than for a small one: zeros of 1,000 elements and more are made, fewer are a constant.
#
# Guess: a tf.function that is traced for batches of 24 and of 6 examples has the same graph twice, with other shapes.
# What happens: where all dimensions are known, `tf.zeros_like` writes fewer than 1,000 zeros into the graph as one Const. From 1,000 on it
# adds a Fill with two constants of its own, so graphs of a batch and of a share of it differ in operations and in names of operations.
# `tf.nn.sigmoid_cross_entropy_with_logits` has such zeros. So names in a graph do not say the same of both, as who compares or
# replays graphs by name assumes.
# Why: `zeros` in tensorflow/python/ops/array_ops.py makes a constant of fewer than 1,000 elements, else calls `fill`.
# Workaround: trace with an unknown first dimension (`tf.TensorSpec((None, 64))`): batches of all sizes have one graph then.
# Versions: TensorFlow 2.21.0
# Seen: operations that only one of the graphs has, for 24 and for 6 examples of 64 labels each.
#     24 alone: Const logistic_loss/zeros_like/Const, Const logistic_loss/zeros_like/shape_as_tensor, Fill logistic_loss/zeros_like
#     6 alone: Const logistic_loss/zeros_like

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0
cat > "$work/graphs.py" <<'PYTHON'
import tensorflow as tf


@tf.function
def losses(labels, logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)


def operations(examples):
    spec = tf.TensorSpec((examples, 64))
    return {(op.type, op.name) for op in losses.get_concrete_function(spec, spec).graph.get_operations()}


whole, share = operations(24), operations(6)
for name, alone in ("24", whole - share), ("6", share - whole):
    print(f"{name} alone:", ", ".join(" ".join(operation) for operation in sorted(alone)))
PYTHON
expect_header "$(run_python graphs.py)"
