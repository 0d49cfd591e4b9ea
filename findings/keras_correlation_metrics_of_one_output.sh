#!/usr/bin/env bash
# PearsonCorrelation of a model with one output is NaN, and with axis=0 it is not the correlation of the data.
#
# Guess: keras.metrics.PearsonCorrelation in compile gives the correlation of labels and predictions over the data of the epoch.
# What happens: its default axis is the last one, so it correlates the outputs of each example. One output has no deviation: 0 / 0 is NaN.
# With axis=0 it is a mean of the correlations of the batches, which depends on the batch size, and on the number of replicas.
# Why: `pearson_correlation` and `PearsonCorrelation`, a `MeanMetricWrapper`, in keras/src/metrics/correlation_metrics.py: the metric
# keeps a sum and a count. ConcordanceCorrelation is the same; R2Score keeps the sums that it needs.
# Workaround: R2Score, or `np.corrcoef` of `model.predict`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: predictions that equal the labels; then labels with noise, whose two halves lie around 0 and 10. R2Score for comparison.
#     perfect, default axis: nan
#     noise, axis=0, one batch: 0.98
#     noise, axis=0, batches of 16: 0.60
#     noise, R2Score, one batch: 0.96
#     noise, R2Score, batches of 16: 0.96

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/metric.py" <<'PYTHON'
import keras
import numpy as np

draw = np.random.default_rng(0)
labels = (draw.normal(size=(64, 1)) + np.repeat([0, 10], 32)[:, None]).astype("float32")
predictions = (labels + draw.normal(size=(64, 1))).astype("float32")


def measured(metric, y_pred, batch_size):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile(loss="mse", metrics=[metric])
    return model.evaluate(y_pred, labels, batch_size=batch_size, verbose=0)[1]


print(f"perfect, default axis: {measured(keras.metrics.PearsonCorrelation(), labels, 16):.2f}")
for name, metric in (("axis=0", lambda: keras.metrics.PearsonCorrelation(axis=0)), ("R2Score", keras.metrics.R2Score)):
    for shown, batch_size in (("one batch", 64), ("batches of 16", 16)):
        print(f"noise, {name}, {shown}: {measured(metric(), predictions, batch_size):.2f}")
PYTHON
expect_header "$(run_python metric.py)"
