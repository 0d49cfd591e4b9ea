"""A Keras model trains in a test's body; `make compat` runs this with tf_keras too."""

from __future__ import annotations

from tests.acceptance.plugin.conftest import Run

FIT = """
import os

import numpy as np
import pytest
import tensorflow as tf

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = X.sum(1, keepdims=True)


def weights(strategy):
    with strategy.scope():
        layer = tf.keras.layers.Dense(1, kernel_initializer="ones")
        model = tf.keras.Sequential([tf.keras.layers.InputLayer((2,)), layer])
        model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True), shuffle=False, verbose=0)
    return layer.get_weights()


def by_hand():
    weight, bias = np.ones((2, 1)), 0.0
    for x, y in zip(np.split(X, 3), np.split(Y, 3)):
        error = 2 * (x @ weight + bias - y) / 4
        weight, bias = weight - 0.5 * x.T @ error, bias - 0.5 * error.sum()
    return weight, bias


@pytest.mark.topology("1x1", "1x2", "1x4")
def test_fit(strategy):
    is_legacy = os.environ.get("GPUDIST_COMPAT_LEGACY_KERAS") == "1"
    assert tf.keras.Model.__module__.split(".")[0] == ("tf_keras" if is_legacy else "keras")
    for found, expected in zip(weights(strategy), by_hand(), strict=True):
        np.testing.assert_allclose(found.reshape(-1), np.reshape(expected, -1), rtol=1e-4, atol=1e-6)
"""


def test_a_model_of_tf_keras_fits_in_a_test_as_it_does_by_hand(run: Run) -> None:
    run(FIT).assert_outcomes(passed=3)
