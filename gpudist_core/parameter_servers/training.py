"""Train with a ClusterCoordinator: workers compute gradients, only the coordinator updates the servers' variables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import Unavailable, UsageError, check_choice, is_finite, is_whole
from gpudist_core.gradients import Clipping
from gpudist_core.parameter_servers import workers
from gpudist_core.pipelines import Pipeline
from gpudist_core.pipelines.plan import rows_between
from gpudist_core.pipelines.plan import shares as rows_of_parts
from gpudist_core.steps import arguments
from gpudist_core.upstream import losses, models, optimizers, patches, randomness, strategies

SCHEDULES = ("asynchronous", "lock-step")
DEFAULT_TIMEOUT_SECONDS = 600.0
_T = TypeVar("_T")


class CoordinatedTraining:
    """Train steps as `TrainStep` does, with parameter servers: asynchronously, or in lock-step with the result of one device.

    Workers read the variables from the servers, compute the gradients of their examples, and send them back. They change
    nothing. The coordinator applies each result once. So a worker may die at any moment: another worker repeats its work, and
    it counts once. `optimizer.iterations` is exactly the number of updates. The price: all gradients pass through the
    coordinator's network, once in and once out (those of embeddings are sparse and small).

    - `lock-step`: each global batch is cut into one part for each worker. The parts' sums are added in order, divided by the
      total weight, clipped and applied. The result is that of one device, within rounding.
    - `asynchronous`: one worker processes each global batch, and the result is applied when it arrives. Meanwhile the other
      workers use older variables, by at most as many updates as there are other workers. The order of updates depends on
      timing, their number does not. A layer that changes its state in the forward pass (BatchNormalization's moving averages)
      does so on the worker, once for each time the work is done.

    Example:
        On a cluster with parameter servers (`gpudist run train.py --topology 2x1+1ps` emulates one)::

            strategy = gd.make_strategy()                 # workers and servers stay in this call; the chief continues
            with strategy.scope():
                model, optimizer = build_model(), keras.optimizers.Adam()
            training = gd.CoordinatedTraining(model, optimizer, "sparse_categorical_crossentropy", schedule="lock-step")
            for epoch in range(3):
                losses = training.train(data)             # a gd.Pipeline; the loss of each global batch, in order

    Args:
        model: A Keras model, or a callable with `trainable_variables`, made in the strategy's scope.
        optimizer: A Keras 3 optimizer, made in the strategy's scope. It is changed in place, as by `TrainStep`.
        per_example_loss: As for `TrainStep`.
        schedule: `asynchronous` or `lock-step`.
        clip_norm: The largest L2 norm of each variable's gradient (of each part of a partitioned variable).
        clip_global_norm: The largest L2 norm of all gradients together.
        clip_value: The largest absolute value in a gradient.
        accumulate: Number of batches that make one update: consecutive batches in lock-step, otherwise in order of arrival.
        draws: As for `TrainStep`, with workers in place of replicas.
        metrics: Keras metrics, updated with (y, y_pred, weight) on the coordinator, once for each batch.
        variables: The variables to train. Default: the model's trainable variables.
        check_finite: Raise `InvalidArgumentError`, which names the variable, if a gradient is not finite. Its batches are left
            out; the training may continue with the next ones.
        timeout_seconds: The longest time without a result from any worker, in seconds; None for no limit.
        strategy: The `ParameterServerStrategy`. Default: the strategy of the model.

    Raises:
        UsageError: If an argument is not valid, or arguments do not fit together.
    """

    def __init__(
        self,
        model: keras.Model | Callable[..., Any],
        optimizer: keras.optimizers.Optimizer,
        per_example_loss: keras.losses.Loss | Callable[[Any, Any], Any] | str,
        *,
        schedule: str = "asynchronous",
        clip_norm: float | None = None,
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        draws: str = "replica",
        metrics: Sequence[keras.metrics.Metric] = (),
        variables: Sequence[tf.Variable | keras.Variable] | None = None,
        check_finite: bool = False,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        check_choice(SCHEDULES, schedule=schedule)
        check_choice(randomness.DRAWS, draws=draws)
        arguments.check_accumulate(accumulate)
        optimizers.check(optimizer)
        optimizers.check_single_updates(optimizer)
        arguments.check_model(model, variables)
        if timeout_seconds is not None and not (is_finite(timeout_seconds) and timeout_seconds > 0):
            raise UsageError(
                "timeout_seconds must be a positive number or None", "None means no limit.", timeout_seconds=timeout_seconds
            )
        self.strategy: Any = strategy if strategy is not None else models.strategy_of(model)
        if not strategies.is_coordinated(self.strategy):
            raise UsageError(
                "CoordinatedTraining needs a model made in the scope of a ParameterServerStrategy",
                "Use make_strategy() in a cluster with ps tasks. Use TrainStep with other strategies.",
                strategy=type(self.strategy).__name__,
            )
        patches.of_step.prepare()
        strategies.let_be_read(model)
        self.model: Any = model
        self.metrics, self.schedule = arguments.checked_metrics(metrics), schedule
        self.accumulate, self.draws, self.check_finite = accumulate, draws, check_finite
        self._loss = losses.per_example_function(per_example_loss)
        self._clip = Clipping(clip_norm, clip_global_norm, clip_value)
        self._given = arguments.checked_variables(variables)
        _check_on_servers(model=model, optimizer=optimizer)
        with self.strategy.scope():
            self.optimizer = optimizers.exact_optimizer(models.scaled_where_needed(model, optimizer), self.strategy)
        self._workers = workers.Workers(self.strategy, timeout_seconds)
        if schedule == "lock-step" and self._workers.num_workers > 1:
            losses.check_rows(per_example_loss)
        self._work: workers.WorkerFunction | None = None
        self._updates: workers.Updates | None = None
        self._sums: workers.Part | None = None
        self._pending = self._num_updates = 0
        self._drawn: dict[int, tuple[Any, int]] = {}
        self._update_metrics = tf.function(self._metrics_of, autograph=False, reduce_retracing=True)

    def train(self, data: Pipeline | Iterable[Sequence[Any]], steps: int | None = None) -> npt.NDArray[np.float32]:
        """Train on global batches. On return each was applied exactly once (or is pending, with `accumulate`).

        Args:
            data: A `Pipeline`, or any iterable of batches (x, y) or (x, y, weight).
            steps: Number of global batches; a pipeline continues with its next epoch if needed. None for the rest of one epoch.

        Returns:
            The loss of each batch before its update, in the order of the batches, as a float32 array of shape (batches,).

        Raises:
            UsageError: If a batch is not valid, or the data end before `steps` batches.
            Unavailable: If a parameter server is lost, or no worker returns a result in time.
        """
        if steps is not None and not is_whole(steps, 0):
            raise UsageError("steps must be an integer >= 0 or None", "None means the rest of the epoch.", steps=steps)
        batches = _batches(data, steps)
        run = self._in_lock_step if self.schedule == "lock-step" else self._asynchronously
        losses = self._outside_scope(lambda: run(batches))
        if steps is not None and len(losses) < steps:
            raise UsageError(
                "The data must last for all steps",
                "Use fewer steps, or a Pipeline, which starts again.",
                steps=steps,
                batches=len(losses),
            )
        return np.asarray(losses, np.float32)

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Train on one global batch and wait for it.

        Args:
            batch: (x, y) or (x, y, weight).

        Returns:
            The loss of the batch before the update, as a float32 scalar.

        Raises:
            UsageError: If the batch is not valid.
            Unavailable: As for `train`.
        """
        return self.train([batch])[0]

    def flush(self) -> None:
        """Apply the pending batches as one update.

        Call it at the end of data whose number of batches `accumulate` does not divide.
        """
        if self._pending:
            self._outside_scope(self._apply_pending)

    @property
    def pending(self) -> int:
        """Return the number of accumulated batches that have not made an update yet."""
        return self._pending

    @property
    def num_updates(self) -> int:
        """Return the number of updates that this object has made. `optimizer.iterations` has grown by the same number."""
        return self._num_updates

    @property
    def trained_variables(self) -> list[tf.Variable | keras.Variable]:
        """Return the trained variables, in the order of the gradients. A partitioned variable is listed by its parts."""
        whole = self._given if self._given is not None else list(self.model.trainable_variables)
        return [part for variable in whole for part in strategies.parts_of(variable)]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint besides model and optimizer: pending batches and their sums, as arrays by name."""
        kept = {} if self._sums is None else workers.flattened(self._sums)
        return {"pending": self._pending, "sums": kept, "accumulate": self.accumulate}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, with any number of workers and servers.

        Args:
            state: The result of `state`.

        Raises:
            UsageError: If it comes from a training with another `accumulate`, or from a `TrainStep` with pending batches.
        """
        pending = arguments.checked_pending(state, self.accumulate, "CoordinatedTraining", "sums")
        self._pending = pending
        self._sums = workers.unflattened(state["sums"], len(self.trained_variables)) if pending else None

    def _in_lock_step(self, batches: Iterable[Any]) -> list[float]:
        losses = []
        for batch in map(_checked, batches):
            self._build(batch)
            parts = self._send(0, 0, batch, self._workers.num_workers)
            arrived: dict[Any, Any] = {}
            while self._workers.under_way:
                arrived.update(self._workers.results())
            losses.append(self._take(batch, [arrived[0, part] for part in range(parts)], items=None))
        return losses

    def _asynchronously(self, batches: Iterable[Any]) -> list[float]:
        losses: dict[int, float] = {}
        under_way: dict[int, Any] = {}
        for item, batch in enumerate(map(_checked, batches)):
            self._build(batch)
            under_way[item] = batch
            self._send(item, item, batch, 1)
            while self._workers.under_way >= self._workers.ahead:
                self._take_arrived(under_way, losses)
        while self._workers.under_way:
            self._take_arrived(under_way, losses)
        strategies.advance_seeds(self._drawn, len(losses))
        return [losses[item] for item in sorted(losses)]

    def _take_arrived(self, under_way: dict[int, Any], losses: dict[int, float]) -> None:
        for (item, _), part in self._workers.results():
            losses[item] = self._take(under_way.pop(item), [part], items=1)

    def _send(self, key: int, item: int, batch: tuple[Any, ...], parts: int) -> int:
        """Send the parts of a batch that have examples, and return their number."""
        assert self._work is not None
        total = int(shares.rows_of(batch))
        sizes = [size for size in rows_of_parts(total, parts) if size > 0]
        for part, size in enumerate(sizes):
            first = sum(sizes[:part])
            place = {"rows": size, "first": first, "total": total, "part": part}
            scalars = {name: tf.constant(value) for name, value in place.items()} | {"item": tf.constant(item, tf.int64)}
            rows = batch if len(sizes) == 1 else tf.nest.map_structure(lambda v: rows_between(v, first, first + size), batch)  # noqa: B023
            function = self._work.traced(rows, scalars, len(sizes))
            if self.schedule == "lock-step":
                self._work.check_writes_nothing(function)
            self._drawn = self._work.draws_of(function)
            self._workers.send((key, part), function, (rows, scalars))
        return len(sizes)

    def _take(self, batch: tuple[Any, ...], parts: list[workers.Part], items: int | None) -> float:
        """Use a batch's results, only here and only once, and return its loss."""
        assert self._updates is not None
        outputs = [part["y_pred"] for part in parts if self.metrics]
        whole = self._updates.of_batch([{name: value for name, value in part.items() if name != "y_pred"} for part in parts])
        if outputs:
            y_pred = tf.nest.map_structure(lambda *values: tf.concat(values, 0), *outputs)
            self._update_metrics(batch[1], y_pred, batch[2] if len(batch) > 2 else None)
        self._sums = whole if self._sums is None else self._updates.sum(self._sums, whole)
        self._pending += 1
        if self._pending >= self.accumulate:
            self._apply_pending()
        if items is None:
            strategies.advance_seeds(self._drawn)
        return float(workers.loss_of(whole))

    def _apply_pending(self) -> None:
        assert self._updates is not None
        assert self._sums is not None
        sums, self._sums, self._pending = self._sums, None, 0  # an update that is refused is over all the same
        self._updates.apply(sums)
        self._num_updates += 1

    def _metrics_of(self, y: Any, y_pred: Any, weight: Any) -> None:
        for metric in self.metrics:
            metric.update_state(y, y_pred, sample_weight=weight)

    def _build(self, batch: tuple[Any, ...]) -> None:
        """Create the missing variables on the servers, and the functions that use them."""
        if self._work is not None:
            return
        with self.strategy.scope():
            models.build(self.model, self.strategy.experimental_local_results, batch[0])
            variables = self.trained_variables
            if not self.optimizer.built:
                self.optimizer.build(variables)
        strategies.let_be_read(self.model)
        _check_optimizer(self.optimizer, variables)
        scale = optimizers.loss_scaling_of(self.optimizer)
        self._work = workers.WorkerFunction(self.model, variables, self._loss, scale, self.draws, bool(self.metrics))
        self._updates = workers.Updates(self.optimizer, variables, self._clip, self.check_finite)

    def _outside_scope(self, action: Callable[[], _T]) -> _T:
        """Run an action outside of every strategy, as Keras's optimizers need it. Explain the error of a lost server."""
        try:
            if not tf.distribute.has_strategy():
                return action()
            with futures.ThreadPoolExecutor(1) as thread:
                return thread.submit(action).result()
        except Exception as error:
            lost = workers.server_lost(error)
            if lost is None and not isinstance(error, Unavailable):
                self._workers.forget()
            raise (lost or error) from (error if lost else None)


def _check_on_servers(**owners: Any) -> None:
    for name, owner in owners.items():
        for variable in getattr(owner, "variables", []):
            for part in strategies.parts_of(variable):
                if "/job:ps" not in str(models.plain(part).device):
                    raise UsageError(
                        f"{name} must be made in the scope of the ParameterServerStrategy",
                        "Make it under `with strategy.scope():`.",
                        variable=part.name,
                        device=models.plain(part).device,
                    )


def _check_optimizer(optimizer: Any, variables: list[Any]) -> None:
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    built = strategies.variables_of(inner)
    if [id(v) for v in built] != [id(models.plain(v)) for v in variables]:
        raise UsageError(
            "The optimizer must be built with the trained variables, with partitioned ones in their parts",
            "Do not build the optimizer yourself, or pass the variables it was built with.",
            built=[v.name for v in built][:8],
            trained=[v.name for v in variables][:8],
        )


def _checked(batch: Any) -> tuple[Any, ...]:
    parts = tuple(tf.nest.map_structure(arguments.as_tensor, arguments.checked_batch(batch)))
    rows = {int(shares.rows_of([leaf])) for leaf in tf.nest.flatten(parts)}
    if len(rows) != 1:
        raise UsageError("All parts of a batch must have the same number of examples", "Fix the data.", rows=sorted(rows))
    if rows == {0}:
        raise UsageError("A batch must have at least one example", "Leave empty batches out.", rows=0)
    return parts


def _batches(data: Any, steps: int | None) -> Iterator[Any]:
    """Return the batches to train on. Those of a pipeline are on this process's CPU and continue after the last ones."""
    if not hasattr(data, "distribute"):
        if not isinstance(data, Iterable):
            raise UsageError("data must be a Pipeline, or batches (x, y) or (x, y, weight)", data=data)
        return itertools.islice(data, steps)
    with tf.device("CPU:0"):
        here = tf.zeros([]).device
    epochs = data.distribute(tf.distribute.OneDeviceStrategy(here))
    return iter(epochs) if steps is None else itertools.islice(itertools.chain.from_iterable(itertools.repeat(epochs)), steps)
