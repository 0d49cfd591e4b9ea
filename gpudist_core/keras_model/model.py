"""Give Keras's fit, evaluate and predict the result of one device on every topology."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core import state
from gpudist_core.errors import Unavailable, UsageError, is_whole
from gpudist_core.keras_model import functions, sources
from gpudist_core.keras_model.accumulation import Accumulations
from gpudist_core.keras_model.callbacks import Callbacks, closing_checkpoints
from gpudist_core.keras_model.functions import BatchFunction, CountingFunction, PredictFunction, trained_by
from gpudist_core.pipelines import Pipeline
from gpudist_core.static import table_of
from gpudist_core.upstream import models, optimizers, trainer
from gpudist_core.upstream.row_means import make_variables_local

# `patches.mix_in` puts the class of the model behind `DistributedModel`. Its members are known only then, so its type is Any.
_ClassOfModel: Any = object


class DistributedModel(_ClassOfModel):
    """Extend the class of a model. `distributed` applies it; everything else is the model's own and Keras's."""

    # The methods below set these.
    predict_function: Any
    test_function: Any
    train_function: Any

    _gpudist_draws = "replica"
    _gpudist_synchronizes = True

    @property
    def _gpudist_place(self) -> Any:
        """Return the strategy whose replicas get the batches."""
        return self.distribute_strategy

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as Keras does, in the strategy's scope. Optimizers then sum gradients before they use them."""
        models.check_current(self)
        with self.distribute_strategy.scope():
            super().compile(*args, **kwargs)
            self._gpudist_exact()

    def _gpudist_exact(self) -> None:
        """Make the compiled parts exact."""
        strategy = self.distribute_strategy
        if self.jit_compile and strategy.num_replicas_in_sync > 1:
            raise Unavailable(
                "XLA must compile a step for one device only. Received: jit_compile=True, "
                f"replicas={strategy.num_replicas_in_sync}. Leave jit_compile out, or use one device."
            )
        if strategy.num_replicas_in_sync > 1:
            trainer.check_losses(self)
        own = trainer.optimizers_of(self)
        for optimizer in own:
            models.check_scope(strategy, self, optimizer)
            optimizers.exact_optimizer(optimizer, strategy)
        accumulating = [optimizer for optimizer in own if optimizers.accumulates(optimizer)]
        state.of_model.of(self).accumulations = Accumulations(accumulating, strategy) if accumulating else None

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Keras's fit does. `x` may be a `gd.Pipeline`. The batch size is that of the global batch.

        Args:
            *args: Keras's arguments.
            **kwargs: Keras's arguments.

        Returns:
            Keras's `History`.
        """
        models.check_current(self)
        fit = super().fit
        given = inspect.signature(fit).bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if isinstance(asked.get("validation_data"), Pipeline) and asked.get("validation_batch_size") is not None:
            raise UsageError(
                "A pipeline must provide the targets, weights and batches itself",
                "Leave them out of fit, and put them into the pipeline.",
                validation_batch_size=asked["validation_batch_size"],
            )
        callbacks = self._gpudist_callbacks(asked, history=True)
        kept = state.of_model.of(self)
        kept.fits += 1
        kept.next_iterator = trainer.NextIterator(self._gpudist_epochs_of(callbacks, training=True))
        try:
            with kept.next_iterator, closing_checkpoints(asked.get("callbacks")):
                return fit(*given.args, **given.kwargs)
        finally:  # what it holds may refer to the model
            kept.next_iterator = kept.pipeline = kept.epochs = None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Keras's evaluate does. Every example counts once.

        Args:
            *args: Keras's arguments.
            **kwargs: Keras's arguments.

        Returns:
            Keras's result.
        """
        models.check_current(self)
        evaluate = super().evaluate
        given = inspect.signature(evaluate).bind(*args, **kwargs)
        given.apply_defaults()
        callbacks = self._gpudist_callbacks(given.arguments, history=False)
        if given.kwargs.get("_use_cached_eval_dataset"):  # in a fit, which has made its iterator
            return evaluate(*given.args, **given.kwargs)
        with trainer.NextIterator(self._gpudist_epochs_of(callbacks, training=False)):
            return evaluate(*given.args, **given.kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as Keras's predict does, with the examples in order. Every host gets all of them.

        Args:
            *args: Keras's arguments.
            **kwargs: Keras's arguments.

        Returns:
            Keras's result.
        """
        models.check_current(self)
        with trainer.NextIterator(self._gpudist_epochs_of(None, training=False)):
            return super().predict(*args, **kwargs)

    def set_weights(self, weights: Any) -> None:
        """Set the weights as Keras does. A sharded table takes all of its rows, as get_weights returns them.

        Args:
            weights: The result of `get_weights`.

        Raises:
            ValueError: If their number or shapes differ.
        """
        values, variables = list(weights), self.weights
        tables = {i: table for i, v in enumerate(variables) if (table := table_of(v)) is not None}
        if not tables or len(values) != len(variables):
            super().set_weights(values)
            return
        for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
            shape = tables[i].shape if i in tables else tuple(variable.shape)
            if shape != tuple(value.shape):
                raise ValueError(
                    f"A weight must keep its shape. Received: weight={variable.path!r}, shape={tuple(value.shape)}, "
                    f"needed={shape}. Pass the result of get_weights() of such a model."
                )
            tables[i].assign_rows(0, value) if i in tables else variable.assign(value)

    def _gpudist_callbacks(self, asked: dict[str, Any], *, history: bool) -> Any:
        """Return the callbacks in a list that does only what is needed in each step, in place of Keras's list."""
        if isinstance(asked.get("callbacks"), keras.callbacks.CallbackList) or "callbacks" not in asked:
            return None
        asked["callbacks"] = Callbacks(
            asked["callbacks"],
            history=history,
            progress=asked["verbose"] != 0,
            model=self,
            verbose=asked["verbose"],
            epochs=asked.get("epochs", 1),
            steps=None,
        )
        return asked["callbacks"]

    def _gpudist_epochs_of(self, callbacks: Any, *, training: bool) -> Callable[..., sources.Epochs]:
        """Return a function that makes the iterator for Keras's loop: first the loop's own, then that of its validation."""
        iterators: list[sources.Epochs] = []

        def make(
            *,
            x: Any = None,
            steps_per_epoch: int | None = None,
            shuffle: Any = False,
            distribute_strategy: Any = None,
            steps_per_execution: int = 1,
            **data: Any,
        ) -> sources.Epochs:
            if steps_per_epoch is not None and not is_whole(steps_per_epoch, 1):
                raise UsageError(
                    "steps_per_epoch must be a positive integer",
                    "None means all.",
                    steps_per_epoch=steps_per_epoch,
                )
            data |= {"x": x, "steps_per_epoch": steps_per_epoch, "shuffle": shuffle}
            trains = training and not iterators
            if iterators and isinstance(x, Pipeline):  # Keras hands on the size of the batches that it trains with
                data["batch_size"] = None
            # Arrays have another order in each fit, the same on all hosts.
            seed = sources.common_seed(self._gpudist_place, state.of_model.of(self).fits) if trains and shuffle else 0
            source = sources.source_of(self._gpudist_place, data, training=trains, seed=seed)
            epochs = sources.Epochs(source, steps_per_epoch, steps_per_execution)
            if trains:
                kept = state.of_model.of(self)
                kept.pipeline, kept.epochs = source.pipeline, epochs
            if not iterators and callbacks is not None:
                callbacks.set_params(callbacks.params | {"steps": epochs.num_batches})
            iterators.append(epochs)
            return epochs

        return make

    def _should_eval(self, epoch: int, validation_freq: Any) -> bool:
        """Return whether Keras's fit validates after an epoch. For its first validation it makes an iterator."""
        is_due = bool(super()._should_eval(epoch, validation_freq))
        kept = state.of_model.of(self)
        if is_due and kept.next_iterator is not None and getattr(self, "_eval_epoch_iterator", None) is None:
            kept.next_iterator.expect()
        return is_due

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Create all variables before a step is traced, with the shapes of the data and without taking a batch."""
        default = trainer.is_default(type(self), "train_step")
        if default and isinstance(iterator, sources.Epochs) and not isinstance(iterator.source, sources.FromDistributed):
            trainer.check_targets(self, iterator.source.spec)
        if not trainer.needs_build(self):
            return
        strategy = self.distribute_strategy
        spec = (
            iterator.source.spec
            if iterator is not None
            else sources.spec_of(strategy, sources.distributed(strategy, data_batch))
        )
        with strategy.scope():
            if default:
                trainer.build(self, spec)
                return
            # A model that trains itself may take a batch as a whole, or may not be callable. Its parts were made before, or are
            # made in the step, which then reports what is missing.
            for batch in (spec, (spec,)):
                try:
                    trainer.build(self, batch)
                    return
                except UsageError:
                    raise
                except (RuntimeError, TypeError, ValueError):
                    continue

    def make_train_function(self, force: bool = False) -> Any:
        """Compile the training step."""
        trained_before = getattr(self.train_function, "trained", None)
        if trained_before is not None and trained_before != trained_by(self):
            # A function that was traced before trains on what is frozen now, until a batch has another shape.
            warnings.warn(
                "A model must be compiled after its trainable variables change. Received: "
                f"trainable={len(trained_by(self))}, trained before={len(trained_before)}. From now on it trains the variables "
                "that are trainable now. Call compile again.",
                stacklevel=3,
            )
            force = True
        if self.train_function is None or force:
            # `compile` has not seen the variables that a layer makes when it is called for the first time.
            for optimizer in trainer.optimizers_of(self) or [None]:
                models.check_scope(self._gpudist_place, self, optimizer)
            make_variables_local(self._gpudist_place, self.metrics)
            own = not trainer.is_default(type(self), "train_step")
            step = self.train_step if own else functools.partial(functions.train_step, self)
            accumulations = state.of_model.of(self).accumulations
            self.train_function = BatchFunction(self, step, own=own, draws=self._gpudist_draws, accumulations=accumulations)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Compile the evaluation step."""
        if self.test_function is None or force:
            make_variables_local(self._gpudist_place, self.metrics)
            own = not trainer.is_default(type(self), "test_step")
            step = self.test_step if own else functools.partial(functions.test_step, self)
            self.test_function = BatchFunction(self, step, own=own, draws=self._gpudist_draws)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Compile the prediction step."""
        if self.predict_function is None or force:
            self.predict_function = PredictFunction(self, draws=self._gpudist_draws)
        return self.predict_function

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the metrics' results over all replicas. With several hosts, all must call it.

        Returns:
            Keras's result.
        """
        # In a step, and while Keras builds symbolically, a metric is asked for its form, not for its value.
        if shares.current() is not None or not tf.executing_eagerly():
            return dict(super().get_metrics_result())
        made = (f for f in (self.train_function, self.test_function) if isinstance(f, CountingFunction))
        function = next(made, None)
        with (functions.Results(self, self._gpudist_place) if function is None else function.results()).summed():
            return dict(super().get_metrics_result())
