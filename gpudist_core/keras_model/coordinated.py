"""Run Keras's fit with parameter servers: workers compute the gradients of a batch's parts, the coordinator does the rest.

Each global batch is trained in lock-step, with the result of one device. Evaluation and prediction happen on the coordinator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import state
from gpudist_core.errors import Unavailable, UsageError
from gpudist_core.keras_model import sources
from gpudist_core.keras_model.callbacks import Logs
from gpudist_core.keras_model.functions import CountingFunction
from gpudist_core.keras_model.model import DistributedModel
from gpudist_core.parameter_servers.training import CoordinatedTraining
from gpudist_core.steps import local
from gpudist_core.upstream import losses, models, optimizers, trainer

_BY_HAND = "Write the loop with gd.CoordinatedTraining."


class CoordinatedModel(DistributedModel):
    """Extend the class of a model under `ParameterServerStrategy`. `distributed` applies it."""

    @property
    def _gpudist_place(self) -> Any:
        """Return the strategy that makes and evaluates batches: on the coordinator's CPU."""
        kept = state.of_model.of(self)
        if kept.place is None:
            with tf.device("CPU:0"):
                kept.place = tf.distribute.OneDeviceStrategy(tf.zeros([]).device)
        return kept.place

    def _gpudist_exact(self) -> None:
        if self.jit_compile:
            raise Unavailable("XLA cannot compile a step that workers run. Received: jit_compile=True. Leave jit_compile out.")
        optimizers.exact_optimizer(self.optimizer, self.distribute_strategy)
        _check(self)
        training = CoordinatedTraining(
            self,
            self.optimizer,
            _weighed(trainer.single_loss(self)),
            schedule="lock-step",
            draws=self._gpudist_draws,
            metrics=[_Metrics(self)] if trainer.has_metrics(self) else [],
        )
        self.train_function = TrainFunction(self, training)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if not trainer.needs_build(self):
            return
        place = self._gpudist_place
        spec = iterator.source.spec if iterator is not None else sources.spec_of(place, sources.distributed(place, data_batch))
        x = spec[0] if isinstance(spec, (tuple, list)) else spec
        with self.distribute_strategy.scope():
            models.build(self, lambda value: (value,), x)
            if not self.optimizer.built:
                # In their parts: Keras itself would build it for the whole variables.
                self.optimizer.build(self.train_function.training.trained_variables)
            trainer.build(self, spec)

    def make_train_function(self, force: bool = False) -> Any:
        """Compile the training step."""
        if force:
            self.train_function = TrainFunction(self, self.train_function.training)
        return self.train_function


class TrainFunction(CountingFunction):
    """Train on the next batches of an iterator, one after the other, each on all workers.

    Args:
        model: The compiled model.
        training: The `CoordinatedTraining` of the model.
    """

    def __init__(self, model: Any, training: CoordinatedTraining) -> None:
        super().__init__(model)
        self.training = training
        self._names: list[str] | None = None

    def __call__(self, iterator: Iterator[Any]) -> Logs:
        """Train on as many batches as one execution has, or as there are.

        Args:
            iterator: Global batches.

        Returns:
            The logs of the last batch.

        Raises:
            StopIteration: If there is no batch.
        """
        place, trained = self._model._gpudist_place, False
        for batch in itertools.islice(iterator, self._model.steps_per_execution):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(sources.distributed(place, batch))
            loss = self.training((x, (y,) if weight is None else (y, weight)))
            trainer.track_loss(self._model, loss, tf.shape(tf.nest.flatten(x)[0])[0])
            trained = True
        if not trained:
            raise StopIteration
        if self._names is None:
            self._names = list(self._model.get_metrics_result())
        return Logs(self._names, self._model.get_metrics_result)


class _Metrics:
    """Update the metrics given to `compile`, with the weights that are stored beside the targets."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def update_state(self, targets: Any, y_pred: Any, sample_weight: Any = None) -> None:
        trainer.update_metrics(self._model, targets[0], y_pred, targets[1] if len(targets) > 1 else None)


def _weighed(loss: Any) -> Any:
    """Multiply losses by the examples' weights.

    Keras divides their sum by the number of examples, not by the sum of weights.
    """

    def values_of(targets: Any, y_pred: Any) -> Any:
        values = loss(targets[0], y_pred)
        if len(targets) == 1:
            return values
        return losses.masked(values * local.alongside(tf.cast(targets[1], values.dtype), values), losses.mask_of(values))

    return values_of


def _check(model: Any) -> None:
    for name in ("train_step", "compute_loss"):
        if not trainer.is_default(type(model), name):
            raise UsageError(
                f"With parameter servers fit needs Keras's own {name}, because workers run it",
                _BY_HAND,
                model=type(model).__name__,
            )
    if trainer.single_loss(model) is None:
        given = model.loss
        raise UsageError(
            "With parameter servers fit needs one loss that is a mean over the examples",
            _BY_HAND,
            loss=list(given) if isinstance(given, (list, tuple)) else given,
        )
    if steps := optimizers.accumulates(model.optimizer):
        raise UsageError(
            "With parameter servers fit must make an update of each batch",
            "Leave it out, or write the loop with gd.CoordinatedTraining(accumulate=...).",
            gradient_accumulation_steps=steps,
        )
