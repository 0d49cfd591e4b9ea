"""Define the compiled functions behind fit, evaluate and predict.

Of a training or evaluation step each replica runs its part as Keras's own `train_step` and `test_step` do. Each replica counts
its own examples for the metrics, and counts are summed before any division.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.gradients import all_reduce_all, gathered
from gpudist_core.keras_model import sources
from gpudist_core.keras_model.callbacks import Logs
from gpudist_core.replicas import replicas_of
from gpudist_core.state import PerThread
from gpudist_core.strategies.waiting import limited
from gpudist_core.upstream import layers, models, randomness, row_means, trainer

results_of_metrics: PerThread[dict[int, tuple[Any, Any, Any]] | None] = PerThread(None)
"""Of the step that is being traced: each watched metric's result, the metric and its key, by the id of the result."""


class Results:
    """Compute the metrics of a model over all replicas.

    Args:
        model: A compiled Keras model whose metrics have their variables.
        strategy: The strategy of these variables.
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy) -> None:
        self._model = model
        self._strategy = strategy
        self._several_hosts = replicas_of(strategy).num_hosts > 1
        self.metrics = trainer.metrics_of(model)
        self.variables = list({id(v): v for metric in self.metrics for v in metric.variables}.values())
        self._check()
        self._compiled_sums = tf.function(self._sums, autograph=False)
        self._compiled: dict[Any, Any] = {}

    def covers(self, model: Any) -> bool:
        """Return whether the model still has these metrics and variables."""
        metrics = trainer.metrics_of(model)
        count = sum(len(metric.variables) for metric in metrics)
        return [*map(id, metrics)] == [*map(id, self.metrics)] and count >= len(self.variables) and self._covered == count

    def on_replica(self) -> list[Any]:
        """Return each variable's sum over all replicas, in a replica's context; for other values, the first replica's."""
        context = tf.distribute.get_replica_context()
        values = [models.plain(variable).read_value() for variable in self.variables]
        if context is not None and context.num_replicas_in_sync > 1:
            is_first = tf.equal(context.replica_id_in_sync_group, 0)
            values = [
                value if variable.aggregation == "sum" else tf.where(is_first, value, tf.zeros_like(value))
                for variable, value in zip(self.variables, values, strict=True)
            ]
        return all_reduce_all(values)

    def now(self) -> list[Any]:
        """Return the sums as `on_replica` does, outside of a step. With several hosts, all must call it."""
        return list(self._compiled_sums())

    def of(self, plan: dict[str, tuple[Any, Any]], sums: list[Any]) -> dict[str, Any]:
        """Return the results of some metrics.

        Args:
            plan: For each name a metric, and the key of its result if that is a dict.
            sums: The result of `now` or `on_replica`.

        Returns:
            The results, as tensors.
        """
        names = tuple(plan)
        if names not in self._compiled:

            def compute(sums: list[Any]) -> dict[str, Any]:
                with self._as_variables(sums):
                    results = {id(metric): metric.result() for metric, _ in plan.values()}
                return {name: results[id(m)] if key is None else results[id(m)][key] for name, (m, key) in plan.items()}

            self._compiled[names] = tf.function(compute, autograph=False)
        return dict(self._compiled[names](sums))

    def _as_variables(self, sums: list[Any]) -> keras.StatelessScope:
        return keras.StatelessScope(state_mapping=list(zip(self.variables, sums, strict=True)))

    def summed(self) -> keras.StatelessScope:
        """Let the metrics' variables read as their sums over all replicas. With several hosts, all must call it."""
        return self._as_variables(self.now())

    def _sums(self) -> list[Any]:
        if self._several_hosts:
            sums = self._strategy.run(self.on_replica)
            return [self._strategy.experimental_local_results(value)[0] for value in sums]

        def total(variable: Any) -> Any:
            parts = self._strategy.experimental_local_results(models.plain(variable))
            if variable.aggregation != "sum" or len(parts) == 1:
                return parts[0].read_value()
            return tf.add_n([part.read_value() for part in parts])

        return [total(variable) for variable in self.variables]

    def _check(self) -> None:
        self._covered = sum(len(metric.variables) for metric in self.metrics)
        if self._strategy.num_replicas_in_sync == 1:
            return
        for metric in self.metrics:
            for variable in metric.variables:
                if getattr(models.plain(variable), "distribute_strategy", None) is not self._strategy:
                    raise UsageError(
                        "A metric must be made in the scope of the model's strategy",
                        "Make it under `with strategy.scope():`.",
                        metric=metric.name,
                        strategy=type(self._strategy).__name__,
                    )


@contextlib.contextmanager
def watched(metrics: list[Any]) -> Iterator[None]:
    """Recognize the results of the metrics among what a traced step returns.

    Args:
        metrics: The metrics.
    """
    each = list({id(metric): metric for metric in metrics}.values())  # a model may name one twice
    for metric in each:
        object.__setattr__(metric, "result", _watching(metric, metric.result))
    try:
        yield
    finally:
        for metric in each:
            object.__delattr__(metric, "result")


def _watching(metric: Any, result: Any) -> Any:
    @functools.wraps(result)
    def watch(*args: Any, **kwargs: Any) -> Any:
        value = result(*args, **kwargs)
        remembered = results_of_metrics.value
        if remembered is not None:
            named = value.items() if isinstance(value, dict) else [(None, value)]
            remembered.update({id(part): (part, metric, key) for key, part in named})
        return value

    return watch


_counts: dict[tuple[int, ...], Any] = {}


class CountingFunction:
    """Count the metrics of a model in steps.

    Args:
        model: The compiled model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._strategy = model._gpudist_place
        self._results: Results | None = None

    def results(self) -> Results:
        """Return the metrics over all replicas."""
        if self._results is None or not self._results.covers(self._model):
            self._results = Results(self._model, self._strategy)
        return self._results


class BatchFunction(CountingFunction):
    """Train or test on the next batches of an iterator, one after the other, each on all replicas.

    Args:
        model: The compiled model.
        step: A function from one replica's data to its logs.
        own: Whether the user wrote the step.
        draws: As for `distributed`.
        accumulations: The accumulations of the model's optimizers; None if there are no gradients.

    Attributes:
        name: The name of the step: `train_step` or `test_step`.
        trained: The ids of the variables that were trainable at tracing; None before.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], *, own: bool, draws: str, accumulations: Any = None) -> None:
        super().__init__(model)
        self.name = str(getattr(step, "func", step).__name__)
        self._step = step
        self._own = own
        self._draws = draws
        self.trained: tuple[int, ...] | None = None
        self._accumulations = accumulations
        self._several_hosts = replicas_of(self._strategy).num_hosts > 1
        self._compiled: dict[tuple[int, ...], Any] = {}
        self._plan: dict[str, tuple[Any, Any]] = {}

    def __call__(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Train or test on as many batches as one execution has, or as there are.

        Args:
            iterator: Global batches, distributed or not.

        Returns:
            The logs of the last batch.

        Raises:
            StopIteration: If there is no batch.
        """
        outputs = None
        for batch in itertools.islice(iterator, self._model.steps_per_execution):
            batch = sources.distributed(self._strategy, batch)
            updates = () if self._accumulations is None else self._accumulations.next()
            counts = _counts_of(self._strategy, batch)
            with limited(self._strategy):
                outputs, applied = self._function(updates)(batch, counts)
            if self._accumulations is not None and self._accumulations.end(applied):
                self._compiled.clear()
        if outputs is None:
            raise StopIteration
        if self.trained is None:
            self.trained = trained_by(self._model)
        values, sums = outputs
        logs = Logs([*self._plan, *values], lambda: self._read(values, sums))
        # train_on_batch and test_on_batch hand over a generator and look at the logs at once, Keras 3.12 not as at a mapping.
        return logs.copy() if inspect.isgenerator(iterator) else logs

    def _read(self, values: dict[str, Any], sums: list[Any]) -> dict[str, Any]:
        results = self.results()
        # On several hosts the step has summed already: one host alone may read its logs.
        summed = [self._strategy.experimental_local_results(value)[0] for value in sums]
        read = results.of(self._plan, summed or results.now()) if self._plan else {}
        for name, value in values.items():
            parts = self._strategy.experimental_local_results(value)
            read[name] = parts[0] if self._several_hosts else _added(name, parts)
        return read

    def _function(self, updates: tuple[int, ...]) -> Any:
        """Return the step, traced for the place of each optimizer's next update."""
        if updates not in self._compiled:

            def step(data: Any, counts: Any) -> Any:
                # The counts are no rows of the batch, so no argument: the replicas find them in the graph around them.
                on_replica = functools.partial(self._on_replica, counts)
                with watched(trainer.metrics_of(self._model)):
                    outputs = self._strategy.run(on_replica, args=(data,))
                return outputs, () if self._accumulations is None else self._accumulations.applied

            compiled = tf.function(step, autograph=False, reduce_retracing=True, jit_compile=self._model.jit_compile or None)
            self._compiled[updates] = step if self._model.run_eagerly else compiled
        return self._compiled[updates]

    def _on_replica(self, counts: Any, data: Any) -> Any:
        data = randomness.with_unknown_rows(self._draws, data, self._strategy.num_replicas_in_sync)
        share = shares.Share(shares.rows_of(data), counts=counts)
        with contextlib.ExitStack() as stack:
            stack.enter_context(shares.sharing(share))
            stack.enter_context(row_means.counting(tapes=self._own))
            stack.enter_context(randomness.drawing(self._draws))
            stack.enter_context(layers.synchronizing_batch_norm(self._model._gpudist_synchronizes))
            if self._accumulations is not None:
                stack.enter_context(self._accumulations.during())
            remembered: dict[int, tuple[Any, Any, Any]] = {}
            stack.enter_context(results_of_metrics.set(remembered))
            values = self._logged(self._step(data), remembered)
            if not self._several_hosts:
                return values, []
            names = list(values)
            return dict(zip(names, all_reduce_all([values[n] for n in names]), strict=True)), self.results().on_replica()

    def _logged(self, outputs: Any, remembered: dict[int, tuple[Any, Any, Any]]) -> dict[str, Any]:
        """Return the step's logs, except for results of metrics, which are read after all replicas have counted."""
        outputs = {} if outputs is None else outputs
        if not isinstance(outputs, dict):
            raise UsageError("A step must return a dict of logs", "Return {'loss': loss}, or nothing.", returned=outputs)
        outputs = _flat(outputs)
        self._plan = {name: remembered[id(value)][1:] for name, value in outputs.items() if id(value) in remembered}
        values = {name: value for name, value in outputs.items() if name not in self._plan}
        for name, value in values.items():
            row_means.warn_of_integers(name, value)
        return {name: row_means.of_log(value) for name, value in values.items()}


class PredictFunction:
    """Predict for a list of batches, as Keras's predict calls it.

    Args:
        model: The model.
        draws: As for `distributed`.
    """

    def __init__(self, model: Any, *, draws: str) -> None:
        self._model = model
        self._draws = draws
        self._strategy = model._gpudist_place
        self._replicas = replicas_of(self._strategy)
        self._is_built = False
        compiled = tf.function(self._one, autograph=False, reduce_retracing=True, jit_compile=self._model.jit_compile or None)
        self._function = self._one if model.run_eagerly else compiled

    def __call__(self, data: list[Any]) -> Any:
        """Return the outputs for some batches, with the examples in order. Every host gets all of them.

        Args:
            data: Global batches, distributed or not.

        Returns:
            The structure of the model's outputs, as tensors.
        """
        placed = [sources.distributed(self._strategy, batch) for batch in data]
        if placed and not self._is_built:
            if not trainer.are_layers_built(self._model):
                with self._model.distribute_strategy.scope():
                    trainer.build_layers(self._model, sources.spec_of(self._strategy, placed[0]))
            self._is_built = True
        outputs = []
        for batch in placed:
            with limited(self._strategy):
                of_replicas = self._function(batch)
            outputs.append(self._joined(of_replicas))
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *parts: _concat(parts), *outputs)

    def _one(self, data: Any) -> Any:
        return self._strategy.run(self._on_replica, args=(data,))

    def _on_replica(self, data: Any) -> Any:
        data = randomness.with_unknown_rows(self._draws, data, self._strategy.num_replicas_in_sync)
        share = shares.Share(shares.rows_of(data))
        synchronizing = layers.synchronizing_batch_norm(self._model._gpudist_synchronizes)
        with shares.sharing(share), row_means.counting(tapes=False), randomness.drawing(self._draws), synchronizing:
            outputs = self._model.predict_step(data)
            if self._replicas.num_hosts > 1:
                outputs = tf.nest.map_structure(gathered, outputs)
            return outputs

    def _joined(self, outputs: Any) -> Any:
        if self._replicas.total == 1:
            return outputs
        if self._replicas.num_hosts > 1:
            return tf.nest.map_structure(lambda value: self._strategy.experimental_local_results(value)[0], outputs)
        return tf.nest.map_structure(lambda value: _concat(self._strategy.experimental_local_results(value)), outputs)


def trained_by(model: Any) -> tuple[int, ...]:
    """Return the ids of the variables that a model trains."""
    return tuple(id(variable) for variable in model.trainable_variables)


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested logs as Keras does: the result of the metrics given to `compile` is a dict."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _added(name: str, parts: Any) -> Any:
    shapes = [tuple(part.shape) for part in parts]
    if len(set(shapes)) > 1:
        raise UsageError(
            "A log of a step must be a mean over the examples, with the same shape on all replicas",
            "Return the mean over the examples. Use predict for outputs by example.",
            log=name,
            shapes=shapes,
        )
    return tf.add_n(parts)


def _concat(parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return tf.concat(parts, axis=0) if parts[0].shape.rank else tf.stack(parts)


def _counts_of(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Return the number of examples of each replica as a tensor, if it is known here; made once for each division."""
    if strategy.num_replicas_in_sync == 1:
        return None
    counts = sources.row_counts(strategy, batch)
    if counts is None:
        return None
    if counts not in _counts:
        _counts[counts] = tf.constant(counts, tf.float32)
    return _counts[counts]


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
        y_pred = models.call(model, x)
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
    y_pred = models.call(model, x, training=False)
    _track(model, trainer.loss_of(model, x, y, y_pred, weight, training=False))
    return model.compute_metrics(x, y, y_pred, sample_weight=weight)


def _track(model: Any, loss: Any) -> None:
    share = shares.current()
    assert share is not None
    if loss.shape.rank:  # a value for each row, as `reduction="none"` leaves them
        loss = row_means.present(tf.reduce_mean(loss))
    trainer.track_loss(model, loss, share.rows)
