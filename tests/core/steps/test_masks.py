"""What a mask leaves out counts nowhere: neither in a step's loss, nor in what it is divided by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.steps import training


def _made(keras: Any) -> tuple[Any, Any, Any]:
    """A loss with a class that does not count, of outputs with a mask, as of words of different lengths."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.Dense(3)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return keras.Sequential([keras.Input((4,), dtype="int64"), *layers]), keras.optimizers.SGD(0.5), loss


def _squares(y: Any, y_pred: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tf.square(y_pred), -1)


def _trained(options: dict[str, Any]) -> dict[str, Any]:
    """By a step, and by Keras's own loss on one device."""
    import keras
    import tensorflow as tf

    from gpudist_core.steps import TrainStep

    x = np.arange(40).reshape(10, 4) * 7 % 5
    y = np.arange(40).reshape(10, 4) * 5 % 7 % 4 - 1
    where = training.strategy()
    with where.scope():
        model, optimizer, loss = _made(keras)
        metric = keras.metrics.MeanMetricWrapper(_squares)
    step = TrainStep(model, optimizer, loss, metrics=[metric], **options)
    losses = [float(step(batch)) for batch in training.batches(where, x, y, size=5)]
    alone, optimizer, loss = _made(keras)
    its_metric, expected = keras.metrics.MeanMetricWrapper(_squares), []
    for rows in (slice(5), slice(5, 10)):
        with tf.GradientTape() as tape:
            y_pred = alone(x[rows], training=True)
            value = loss(y[rows], y_pred)
        optimizer.apply(tape.gradient(value, alone.trainable_variables), alone.trainable_variables)
        its_metric.update_state(y[rows], y_pred)
        expected.append(float(value))
    metrics = float(metric.result()), float(its_metric.result())
    return {"losses": (losses, expected), "metrics": metrics, "weights": (model.get_weights(), alone.get_weights())}


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["", "XLA"])
def test_masks_of_outputs_and_losses_count_as_in_keras(on_hosts: OnHosts, options: dict[str, Any]) -> None:
    (seen,) = on_hosts("1x2", _trained, options)
    np.testing.assert_allclose(*seen["losses"], rtol=1e-6)
    np.testing.assert_allclose(*seen["metrics"], rtol=1e-6)
    for ours, right in zip(*seen["weights"], strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-6)


def _several_losses_a_row() -> list[float]:
    """Of as many quantiles as a replica has rows."""
    import keras
    import tensorflow as tf

    from gpudist_core.steps import TrainStep

    def pinball(y: Any, y_pred: Any) -> Any:
        error = tf.cast(y, tf.float32)[:, tf.newaxis] - y_pred
        quantiles = tf.constant([[0.1, 0.5, 0.9]])
        return tf.maximum(quantiles * error, (quantiles - 1) * error)

    images, labels = training.digits(6)
    where = training.strategy()
    losses = []
    for draws in ("replica", "row"):
        with where.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            step = TrainStep(model, keras.optimizers.SGD(0.1), pinball, draws=draws)
        losses += [float(step(batch)) for batch in training.batches(where, images, labels, size=6)]
    return losses


def test_as_many_losses_of_a_row_as_there_are_rows_are_taken(on_hosts: OnHosts) -> None:
    (losses,) = on_hosts("1x2", _several_losses_a_row)
    _, labels = training.digits(6)
    np.testing.assert_allclose(losses, [labels.mean() / 2] * 2, rtol=1e-6)


def _of_several_outputs() -> list[str]:
    """What is said of a mask on the second of two outputs; weights that are None are as if there were none."""
    import warnings

    import keras
    import tensorflow as tf

    from gpudist_core.steps import TrainStep

    where = training.strategy()
    x = np.arange(40).reshape(10, 4) * 7 % 5
    with where.scope():
        words = keras.Input((4,), dtype="int64")
        read = keras.layers.Embedding(5, 4, mask_zero=True)(words)
        model = keras.Model(words, [keras.layers.Dense(1)(keras.layers.GRU(3)(read)), keras.layers.Dense(1)(read)])
        optimizer = keras.optimizers.SGD(0.1)
    step = TrainStep(model, optimizer, lambda y, y_pred: tf.square(y_pred[0][:, 0]) + tf.reduce_sum(y_pred[1], [1, 2]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for pair in training.batches(where, x, x, size=10):
            step((*pair, None))
    return sorted({str(one.message) for one in caught})


def test_masks_of_several_outputs_are_left_to_the_loss_with_a_warning(on_hosts: OnHosts) -> None:
    ((said,),) = on_hosts("1x2", _of_several_outputs)
    assert said == (
        "With several outputs, masked values count unless per_example_loss leaves them out. Received: outputs=2, with a "
        "mask=[1]. Put the mask into y, and apply it in the loss."
    )
