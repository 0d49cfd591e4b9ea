"""`distributed`: a Keras model whose fit is exact on every topology."""

from __future__ import annotations

from typing import TypeVar

from gpudist_core.errors import WrongUse
from gpudist_core.keras_model.model import DistributedModel
from gpudist_core.strategies.made import warn_of_one_device
from gpudist_core.upstream import batch_norm, classes, coordination, models, trainer

DRAWS = ("replica", "row")
Model = TypeVar("Model")


def distributed(model: Model, *, draws: str = "replica", synchronize_batch_norm: bool = True) -> Model:
    """Make Keras's own compile, fit, evaluate and predict of a model exact on every topology.

    With parameter servers each batch is trained in lock-step: workers compute the gradients of its parts, the coordinator
    updates the variables, counts, evaluates and predicts.

    In a `train_step` of one's own a number that is differentiated, or counted by a `Mean`, is taken for the mean over the rows
    that the step was given, as Keras's losses are: what is divided by the global batch size instead is divided twice. Values by
    row are taken for what they are. `tf.clip_by_global_norm`, `tf.clip_by_norm` and `tf.clip_by_value` of gradients as a tape
    made them clip those of all replicas, and `tf.linalg.global_norm` is theirs. A number that a layer adds by `add_loss` is a
    mean over its rows, too (values by row are added up, as Keras does), and so is what it assigns to a variable in its call: a
    running mean becomes that of all rows. A running variance (a norm, a maximum) is no such mean, and becomes the mean of the
    replicas' own: keep running means of `x` and of `x * x`, and make the variance of them. A metric's function that gives one
    number for a batch, and what a step returns as logs, numbers and arrays, are taken so as well.

    A gradient that is not finite on one replica is not finite in the sum: with a loss scale all skip the step, without one all
    copies of a variable are damaged alike, as on one device (`keras.callbacks.TerminateOnNaN` ends such a training).

    Args:
        model: A Keras model, made in the strategy's scope.
        draws: What a layer's dropout or noise depends on: `replica` for other draws on each, `row` for draws that belong
            to the row's place in the global batch, so that they are the same on every topology.
        synchronize_batch_norm: Whether BatchNormalization uses the moments of the global batch.

    Returns:
        The same object; its class is now a subclass of what it was, of the same name, and so is that of a clone, but
        for a clone of a `Sequential`, which is a plain Keras model, as is what is saved.

    Raises:
        WrongUse: Where the model is no Keras model.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise WrongUse("A Keras model is needed", "Use gd.TrainStep for another callable.", model=type(model).__name__)
    if draws not in DRAWS:
        raise WrongUse("draws must be 'replica' or 'row'", "Choose one of them.", draws=draws)
    warn_of_one_device(model, model.distribute_strategy)
    trainer.install()
    settings = {"_gpudist_draws": draws, "_gpudist_synchronizes": synchronize_batch_norm}
    classes.mix_in(model, _kind_of(model), **settings)
    if synchronize_batch_norm:
        batch_norm.mark(model)
    if model.compiled:
        model._gpudist_exact()
    return model


def _kind_of(model: object) -> type[DistributedModel]:
    """What makes a model of this strategy exact."""
    if not coordination.is_coordinated(models.strategy_of(model)):
        return DistributedModel
    from gpudist_core.keras_model.coordinated import CoordinatedModel

    return CoordinatedModel
