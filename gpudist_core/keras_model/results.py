"""Compute metrics over all replicas: each replica counts its own examples, and counts are summed before any division."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.gradients import all_reduce_all
from gpudist_core.replicas import replicas_of
from gpudist_core.state import PerThread
from gpudist_core.upstream import models, trainer

results_of_metrics: PerThread[dict[int, tuple[Any, Any, Any]] | None] = PerThread(None)
"""What watched metrics returned in the replica's step that is traced: the value, the metric and the key, by the value's id."""


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

    @contextlib.contextmanager
    def _as_variables(self, sums: list[Any]) -> Iterator[None]:
        with keras.StatelessScope(state_mapping=list(zip(self.variables, sums, strict=True))):
            yield

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """Let the metrics' variables read as their sums over all replicas. With several hosts, all must call it."""
        with self._as_variables(self.now()):
            yield

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
