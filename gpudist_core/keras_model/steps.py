"""Run one replica's part of a training or evaluation step, as Keras's own `train_step` and `test_step` do."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.upstream import row_means, trainer


def train_step(model: Any, data: Any) -> Any:
    """Train on this replica's examples.

    Args:
        model: A compiled Keras model.
        data: (x, y, weight) as Keras packs them.

    Returns:
        The logs.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = trainer.call(model, x, training=True)
        loss = row_means.present(trainer.loss_of(model, x, y, y_pred, weight, training=True))
        # What crosses replicas (synchronized moments, sharded tables) needs the fraction in the gradient's seed.
        target = row_means.of_all(loss)
        if model.optimizer is not None:
            target = model.optimizer.scale_loss(target)
    _track(model, loss)
    if model.trainable_weights:
        weights = model.trainable_weights
        model.optimizer.apply_gradients(zip(tape.gradient(target, weights), weights, strict=True))
    else:
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
    return model.compute_metrics(x, y, y_pred, sample_weight=weight)


def test_step(model: Any, data: Any) -> Any:
    """Evaluate this replica's examples.

    Args:
        model: A compiled Keras model.
        data: (x, y, weight) as Keras packs them.

    Returns:
        The logs.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = trainer.call(model, x, training=False)
    _track(model, trainer.loss_of(model, x, y, y_pred, weight, training=False))
    return model.compute_metrics(x, y, y_pred, sample_weight=weight)


def _track(model: Any, loss: Any) -> None:
    share = shares.current()
    assert share is not None
    if loss.shape.rank:  # a value for each row, as `reduction="none"` leaves them
        loss = row_means.present(tf.reduce_mean(loss))
    trainer.track_loss(model, loss, share.rows)
