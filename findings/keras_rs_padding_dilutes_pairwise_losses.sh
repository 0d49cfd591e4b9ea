#!/usr/bin/env bash
# The pairwise ranking losses of keras-rs get smaller the further a list is padded, though padded items "are ignored".
#
# Guess: an item with the label -1 forms no pair, so a list has the same loss, however long it was padded.
# What happens: padded items form no pair but count in the mean. A list that was padded to twice its length has half the loss and half the
# gradient. With batches that are padded to their longest list, the weight of a query depends on its neighbors in the batch; a
# fixed maximum length lowers the learning rate. ListMLELoss and the metrics are right.
# Why: `PairwiseLoss.call` in keras_rs/src/losses/pairwise_loss.py returns a sum of pairs for each item, shape (batch, list). The
# reduction of keras.losses.Loss, "sum_over_batch_size", divides by the number of items, padded ones included.
# Workaround: `reduction="sum"`, divided by the number of lists in a loss of your own, or sample_weight.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, keras-rs 0.4.0
# Seen: the loss of one list of 4 items, padded to 8 and to 16 items, divided by that of the list alone.
#     PairwiseHingeLoss: 0.50 0.25
#     PairwiseLogisticLoss: 0.50 0.25
#     PairwiseMeanSquaredError: 0.50 0.25
#     PairwiseSoftZeroOneLoss: 0.50 0.25
#     ListMLELoss: 1.00 1.00
#     NDCG: 1.00 1.00

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0 keras-rs==0.4.0 tensorflow-recommenders==0.7.7
cat > "$work/padding.py" <<'PYTHON'
import keras_rs
import numpy as np

labels, scores = [1.0, 0.0, 2.0, 0.0], [0.3, 0.1, 0.2, 0.9]
losses, metrics = keras_rs.losses, keras_rs.metrics


def padded(values, filler, length):
    return np.array([values + [filler] * (length - len(values))], "float32")


def value(measure, length):
    return float(measure()(padded(labels, -1.0, length), padded(scores, 0.0, length)))


for measure in (
    losses.PairwiseHingeLoss,
    losses.PairwiseLogisticLoss,
    losses.PairwiseMeanSquaredError,
    losses.PairwiseSoftZeroOneLoss,
    losses.ListMLELoss,
    metrics.NDCG,
):
    alone = value(measure, 4)
    print(f"{measure.__name__}: {value(measure, 8) / alone:.2f} {value(measure, 16) / alone:.2f}")
PYTHON
expect_header "$(run_python padding.py)"
