"""Make a Keras model exact: its class is extended by the one for its strategy."""

from __future__ import annotations

from typing import TypeVar

import keras

from gpudist_core.errors import UsageError, check_choice
from gpudist_core.keras_model.model import DistributedModel
from gpudist_core.strategies.make import warn_of_one_device
from gpudist_core.upstream import layers, models, patches, randomness, strategies

Model = TypeVar("Model")


def distributed(model: Model, *, draws: str = "replica", synchronize_batch_norm: bool = True) -> Model:
    """Make Keras's compile, fit, evaluate and predict of a model give the result of one device on every topology.

    With `draws="row"` this also holds for dropout and other random layers. By default each replica draws its own numbers.

    With parameter servers each batch is trained in lock-step: workers compute the gradients of its parts. The coordinator
    updates the variables, counts the metrics, evaluates and predicts.

    In a custom `train_step`, gpudist treats each scalar that you differentiate, pass to a `Mean` or return as a log as the mean
    over this replica's examples, as Keras's losses are. So do not divide a loss by the global batch size. A loss with one value
    for each example is also correct.

    - A tape gives the gradients of all replicas. So clipping, norms, accumulation and assignments by hand are those of one
      device. Do not sum the gradients again. In a `tf.function`, branch or loop of the step a tape gives a replica's part.
    - A scalar that a layer passes to `add_loss` is a mean over its examples. Values by example are summed, as in Keras.
    - A value that a layer assigns to a variable in its call is averaged over the replicas, weighted by examples: a running mean
      becomes that of all examples. A running variance, norm or maximum does not. Keep running means of `x` and `x * x` instead,
      and compute the variance from them.
    - A metric function that returns one number for a batch is treated as a mean over the examples.

    If a gradient is not finite on one replica, the sum is not finite. With a loss scale all replicas skip the step. Without a
    loss scale all copies of a variable become non-finite, as on one device (`keras.callbacks.TerminateOnNaN` stops such a
    training).

    Args:
        model: A Keras model, made in the strategy's scope.
        draws: How a layer's dropout or noise is drawn. `replica`: differently on each replica. `row`: by the example's index in
            the global batch, so that it is the same on every topology.
        synchronize_batch_norm: Whether BatchNormalization uses the moments of the global batch.

    Returns:
        The same object. Its class is now a subclass of the old class, with the same name. So is the class of a clone, except
        that a clone of a `Sequential` and a saved model are plain Keras models.

    Raises:
        UsageError: If `model` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise UsageError("model must be a Keras model", "Use gd.TrainStep for other callables.", model=type(model).__name__)
    check_choice(randomness.DRAWS, draws=draws)
    warn_of_one_device(model, model.distribute_strategy)
    patches.of_step.prepare()
    settings = {"_gpudist_draws": draws, "_gpudist_synchronizes": synchronize_batch_norm}
    kind = DistributedModel
    if strategies.is_coordinated(models.strategy_of(model)):
        from gpudist_core.keras_model.coordinated import CoordinatedModel

        kind = CoordinatedModel
    patches.mix_in(model, kind, **settings)
    if synchronize_batch_norm:
        layers.mark_batch_norm(model)
    if model.compiled:
        model._gpudist_exact()
    return model
