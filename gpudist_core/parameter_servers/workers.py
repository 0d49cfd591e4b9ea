"""Send work to the workers of a ClusterCoordinator, and receive results. A lost worker's work goes to another worker.

The work is a worker's part of one global batch, without side effects, so that it may run twice and count once. On the
coordinator the workers' sums are added, divided once and applied once.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import Unavailable, UsageError
from gpudist_core.gradients import Clipping, checking_finite, scale
from gpudist_core.steps import local
from gpudist_core.upstream import models, optimizers, randomness, strategies

_RETRY_SECONDS = 0.05
_WORK_AHEAD = 2
"""Items under way for each worker: one in work, one waiting."""


class Workers:
    """Manage the workers of a strategy.

    Args:
        strategy: A `ParameterServerStrategy`.
        timeout_seconds: How long to wait for any result, in seconds; None for no limit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout_seconds: float | None) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.num_workers, self.num_servers = strategies.num_tasks(strategy)
        self.ahead = _WORK_AHEAD * self.num_workers
        self.under_way = 0
        self._timeout = timeout_seconds
        self._bringers = _Bringers(self.ahead)

    def send(self, key: Any, function: Any, args: Sequence[Any]) -> None:
        """Give work to the first free worker. The work must have no side effects: it is repeated if the worker dies.

        Args:
            key: The key of its result.
            function: A concrete function.
            args: Its arguments: tensors of this process.
        """
        self._bringers.bring(self._coordinator.schedule(function, args=tuple(args)), key)
        self.under_way += 1

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield the results that have arrived, at least one, with their keys.

        Yields:
            The key and the result.

        Raises:
            Unavailable: If nothing arrived in time.
        """
        try:
            arrived = [self._bringers.arrived.get(timeout=self._timeout)]
        except queue.Empty:
            raise Unavailable(
                f"A worker must finish its work in time. Received: timeout_seconds={self._timeout}, "
                f"workers={self.num_workers}, under_way={self.under_way}. Restart the workers, or give them more time."
            ) from None
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._bringers.arrived.get_nowait())
        for key, result, error in arrived:
            self.under_way -= 1
            if error is not None:
                raise error
            yield key, result

    def forget(self) -> None:
        """Drop the work under way, after an error."""
        with contextlib.suppress(Exception):  # the error that led here, which TensorFlow keeps until somebody asks
            self._coordinator.done()
        self.under_way = 0
        self._bringers = _Bringers(self.ahead)


class _Bringers:
    """Wait for results in threads, one for each result that may be under way. The threads are reused.

    Args:
        most: The largest number of threads.

    Attributes:
        arrived: Results in the order of arrival: the key, the result, and the error in its place.
    """

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, 0
        self._awaited: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self.arrived: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()

    def bring(self, remote: Any, key: Any) -> None:
        """Wait for a result.

        Args:
            remote: A `RemoteValue`.
            key: The key of its result.
        """
        self._awaited.put((remote, key))
        if self._threads < self._most:
            self._threads += 1
            # One that waits for a cluster that is gone must not keep the process alive.
            threading.Thread(target=_bring, args=(self._awaited, self.arrived), daemon=True).start()

    def __del__(self) -> None:
        """End each thread once its result has come."""
        for _ in range(self._threads):
            self._awaited.put(None)


def _bring(awaited: queue.SimpleQueue[Any], arrived: queue.SimpleQueue[Any]) -> None:
    while (item := awaited.get()) is not None:
        remote, key = item
        report: tuple[Any, Any, BaseException | None]
        try:
            report = key, _result(remote), None
        except BaseException as error:
            report = key, None, error
        arrived.put(report)
        del item, remote, report  # they hold the gradients


def server_lost(error: BaseException) -> Unavailable | None:
    """Return the error to raise if another error means that a parameter server is lost; None otherwise."""
    gone = (tf.errors.UnavailableError, tf.errors.AbortedError)
    restarted = isinstance(error, tf.errors.OpError) and "context_id" in str(error)
    if "/job:ps" not in str(error) or not (isinstance(error, gone) or restarted):
        return None
    servers = sorted(set(re.findall(r"remote target (/job:ps/[^ ]*task:\d+)", str(error))))
    return Unavailable(
        "A parameter server must stay up: the variables that it held are lost. "
        f"Received: error={type(error).__name__}, servers={servers}. Restart all tasks and continue from the last checkpoint."
    )


def _result(remote: Any) -> Any:
    """Return the result once it is there, or raise the error of the work itself.

    A worker may die when its result is known but not copied yet. TensorFlow repeats the work. Until then, copying raises a new
    error each time, while the error of the work stays the same object.
    """
    last: BaseException | None = None
    while True:
        try:
            return remote.get()
        except tf.errors.OpError as error:
            if error is last:
                raise
            last = error
            time.sleep(_RETRY_SECONDS)


Part = dict[str, Any]
"""The sums of some examples: `grads` (for each variable a tensor, a pair (values, indices), () for none), `loss`, `weight`. If
the model has losses of its inputs, also `own_grads`, `own_loss` and `rows`; these are divided by the number of examples."""


class PartOfBatch(shares.Share):
    """Describe a share whose place the coordinator knows: workers need not ask each other.

    Args:
        place: `rows`, `first`, `total` and `part` of this share: int32 scalars.
        parts: Number of shares in the batch.
    """

    def __init__(self, place: dict[str, Any], parts: int) -> None:
        super().__init__(place["rows"])
        self._place, self.num_replicas, self.replica = place, parts, place["part"]

    @property
    def total(self) -> Any:
        """Return the number of examples in the global batch: a float32 scalar."""
        return tf.cast(self._place["total"], tf.float32)

    @property
    def first(self) -> Any:
        """Return the index of this share's first example in the global batch: an int32 scalar."""
        return self._place["first"]


class WorkerFunction:
    """Hold the function that workers run.

    Args:
        model: The model.
        variables: The variables of the gradients, with partitioned ones in their parts.
        loss: A function (y, y_pred) -> losses of shape (rows, ...).
        scale: The optimizer's loss scaling, or None.
        draws: As for `TrainStep`.
        with_outputs: Whether the model's outputs are sent back, for metrics.
    """

    def __init__(
        self, model: Any, variables: list[Any], loss: Any, scale: Callable[[Any], Any] | None, draws: str, with_outputs: bool
    ) -> None:
        self._model, self._variables, self._loss, self._scale = model, variables, loss, scale
        self._draws, self._with_outputs = draws, with_outputs
        self._functions: dict[int, Any] = {}
        self._seeds: dict[int, dict[int, tuple[Any, int]]] = {}

    def traced(self, batch: tuple[Any, ...], place: dict[str, Any], parts: int) -> Any:
        """Return the concrete function for batches of this shape.

        Args:
            batch: (x, y) or (x, y, weight).
            place: `rows`, `first`, `total`, `part` (int32) and `item` (int64): scalar tensors.
            parts: Number of shares in the batch.

        Returns:
            A `ConcreteFunction`.
        """
        if parts not in self._functions:
            self._functions[parts] = tf.function(functools.partial(self._part, parts), autograph=False)
        return self._functions[parts].get_concrete_function(batch, place)

    def draws_of(self, function: Any) -> dict[int, tuple[Any, int]]:
        """Return what a traced function draws from Keras's seed generators."""
        return self._seeds.get(id(function.graph), {})

    def check_writes_nothing(self, function: Any) -> None:
        """Refuse a forward pass that changes variables: several workers would do so several times, in any order.

        Args:
            function: The result of `traced`.

        Raises:
            UsageError: If it changes variables.
        """
        written = _written(function)
        if written:
            raise UsageError(
                "A lock-step model must not change variables in its forward pass",
                "Replace the layer (BatchNormalization by LayerNormalization, for example), or use "
                'CoordinatedTraining(schedule="asynchronous").',
                variables=written,
            )

    def _part(self, parts: int, batch: tuple[Any, ...], place: dict[str, Any]) -> Part:
        x, y, weight = local.unpack(randomness.with_unknown_rows(self._draws, batch, parts))
        with (
            shares.sharing(PartOfBatch(place, parts)) as share,
            randomness.drawing(self._draws),
            strategies.reading_seeds(place["item"]) as seeds,
        ):
            result = self._sums(share, x, y, weight)
        self._seeds[id(tf.compat.v1.get_default_graph())] = seeds.draws
        return result

    def _sums(self, share: shares.Share, x: Any, y: Any, weight: Any) -> Part:
        scale = None if self._scale is None else self._scale(tf.constant(1.0))
        with tf.GradientTape(persistent=True) as tape:
            y_pred = models.call(self._model, x)
            loss, total = local.weighted_losses(self._loss, y, y_pred, weight)
            of_variables, of_inputs = local.separate(self._model, getattr(self._model, "losses", []), loss.dtype)
            if of_variables is not None:
                loss += of_variables * total
            rows = tf.cast(share.rows, loss.dtype)
            own = None if of_inputs is None else of_inputs * rows
            targets = [None if value is None else local.scaled(share, value, scale) for value in (loss, own)]
        grads, own_grads = (self._gradients(share, tape, target, scale) for target in targets)
        part = {"grads": grads, "loss": loss, "weight": total}
        if own is not None:
            part |= {"own_grads": own_grads, "own_loss": own, "rows": rows}
        return part | ({"y_pred": y_pred} if self._with_outputs else {})

    def _gradients(self, share: shares.Share, tape: Any, target: Any, scale: Any) -> list[Any]:
        if target is None:
            return []
        grads = local.unscaled_rows(share, tape.gradient(target, self._variables), scale)
        return sendable(grads)


def sendable(grads: list[Any]) -> list[Any]:
    """Return gradients in the form of a `Part`: RemoteValue does not take None."""
    return [() if g is None else (g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def _written(function: Any) -> list[str]:
    """Return the names of the variables that a concrete function writes; inside nested functions, of the writing operations."""
    names = {id(inner): _name(outer, function) for outer, inner in function.graph.captures}
    top = [names.get(id(op.inputs[0]), op.name) for op in function.graph.get_operations() if _writes(op.type)]
    called = [node for inner in function.graph.as_graph_def().library.function for node in inner.node_def]
    return sorted({*top, *(node.name for node in called if _writes(node.op))})


def _writes(operation: str) -> bool:
    return operation.startswith(("Assign", "ResourceScatter"))


def _name(captured: Any, function: Any) -> str:
    return next((str(v.name) for v in function.graph.variables if getattr(v, "handle", None) is captured), "a variable")


class Updates:
    """Apply every update exactly once, and count every step, as the only writer of the trained variables.

    Args:
        optimizer: The result of `exact_optimizer`.
        variables: The trained variables, with partitioned ones in their parts.
        clip: Clipping before the optimizer's own.
        check_finite: Whether a gradient that is not finite is an error.
    """

    def __init__(self, optimizer: Any, variables: list[Any], clip: Clipping, check_finite: bool) -> None:
        self._optimizer, self._variables, self._clip, self._check_finite = optimizer, variables, clip, check_finite
        self._traced: dict[str, Any] = {}

    def of_batch(self, parts: Sequence[Part]) -> Part:
        """Return the sums of one batch. The model's losses of its inputs are weighted by the batch's number of examples.

        Args:
            parts: The workers' results, in the order of their examples, without the model's outputs; at least one.

        Returns:
            `grads`, `loss` and `weight`.
        """
        if len(parts) == 1 and "own_grads" not in parts[0]:
            return parts[0]
        whole: Part = self._function(f"batch of {len(parts)}", self._whole, list(parts))
        return whole

    def sum(self, first: Part, second: Part) -> Part:
        """Add the sums of two or more batches.

        Args:
            first: A result of `of_batch` or `sum`.
            second: A result of `of_batch` or `sum`.

        Returns:
            Their sum.
        """
        together: Part = self._function("sum", _added, [first, second])
        return together

    def apply(self, part: Part) -> None:
        """Make one update.

        Args:
            part: The sums over all examples of the update.
        """
        self._function("update", self._update, part)

    def _function(self, key: str, function: Any, argument: Any) -> Any:
        """Trace once, for any number of rows in sparse gradients."""
        if key not in self._traced:
            self._traced[key] = tf.function(function, autograph=False).get_concrete_function(_spec(argument))
        return self._traced[key](argument)

    def _whole(self, parts: list[Part]) -> Part:
        whole = _added(parts)
        if "own_grads" not in whole:
            return whole
        units = tf.math.divide_no_nan(whole["weight"], whole["rows"])
        shapes = [v.shape for v in self._variables]
        grads, own = ([_gradient(*pair) for pair in zip(whole[name], shapes, strict=True)] for name in ("grads", "own_grads"))
        together = [_together(g, scale(o, units)) for g, o in zip(grads, own, strict=True)]
        return {"grads": sendable(together), "loss": whole["loss"] + whole["own_loss"] * units, "weight": whole["weight"]}

    def _update(self, part: Part) -> None:
        factor = tf.math.reciprocal_no_nan(part["weight"])
        sums = [_gradient(g, v.shape) for g, v in zip(part["grads"], self._variables, strict=True)]
        grads = [scale(g, factor) for g in sums]
        with (
            checking_finite(on=self._check_finite) as checked,
            optimizers.reducing(self._optimizer, lambda summed, _: summed, self._clip),
        ):
            grads = checked(grads, self._variables)
            self._optimizer.apply_gradients(zip(grads, self._variables, strict=True))


def loss_of(part: Part) -> Any:
    """Return the loss of the batches in a sum: a scalar."""
    return tf.math.divide_no_nan(part["loss"], part["weight"])


def flattened(part: Part) -> dict[str, Any]:
    """Return a part as arrays by name: `grads/0`, or `grads/0/values` and `grads/0/indices`; none without a gradient."""
    arrays: dict[str, Any] = {}
    for name, value in part.items():
        for i, gradient in enumerate(value if name.endswith("grads") else ()):
            if isinstance(gradient, (tuple, list)):
                arrays |= {
                    f"{name}/{i}/{half}": value.numpy() for half, value in zip(("values", "indices"), gradient, strict=False)
                }
            else:
                arrays[f"{name}/{i}"] = gradient.numpy()
        if not name.endswith("grads"):
            arrays[name] = value.numpy()
    return arrays


def unflattened(arrays: Mapping[str, Any], num_variables: int) -> Part:
    """Return the part that `flattened` converted."""

    def gradient(name: str) -> Any:
        if f"{name}/values" in arrays:
            return tuple(tf.convert_to_tensor(arrays[f"{name}/{half}"]) for half in ("values", "indices"))
        return tf.convert_to_tensor(arrays[name]) if name in arrays else ()

    names = {name.split("/")[0] for name in arrays} | {"grads"}
    return {
        name: [gradient(f"{name}/{i}") for i in range(num_variables)]
        if name.endswith("grads")
        else tf.convert_to_tensor(arrays[name])
        for name in sorted(names)
    }


def _added(parts: list[Part]) -> Part:
    def plus(first: Any, second: Any) -> Any:
        # What workers sent for one variable has one form, because they ran the same function.
        if isinstance(first, (tuple, list)):
            return tuple(tf.concat(pair, 0) for pair in zip(first, second, strict=True))
        return first + second

    added: Part = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name.endswith("grads"):
            added[name] = [functools.reduce(plus, grads) for grads in zip(*values, strict=True)]
        else:
            added[name] = functools.reduce(plus, values)
    return added


def _together(first: Any, second: Any) -> Any:
    """Add two gradients of one variable; sparse if both are. Slices of the same rows of the data stay one."""
    if first is None or second is None:
        return first if second is None else second
    if not (isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices)):
        return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
    # Keras's optimizers square each slice for itself: two slices where one device has one would be another step.
    as_many = tf.equal(tf.size(first.indices), tf.size(second.indices))
    values, indices = tf.cond(
        as_many,
        lambda: tf.cond(
            tf.reduce_all(tf.equal(first.indices, second.indices)),
            lambda: (first.values + second.values, first.indices),
            lambda: _both(first, second),
        ),
        lambda: _both(first, second),
    )
    return tf.IndexedSlices(values, indices, first.dense_shape)


def _both(first: Any, second: Any) -> tuple[Any, Any]:
    return tf.concat([first.values, second.values], 0), tf.concat([first.indices, second.indices], 0)


def _spec(argument: Any) -> Any:
    """Return the signature that a function is traced for."""
    if isinstance(argument, tuple):
        return tuple(tf.TensorSpec((None, *value.shape[1:]), value.dtype) for value in argument)
    if isinstance(argument, dict):
        return {name: _spec(value) for name, value in argument.items()}
    return [_spec(value) for value in argument] if isinstance(argument, list) else tf.TensorSpec(argument.shape, argument.dtype)


def _gradient(sent: Any, shape: Any) -> Any:
    """Return a worker's gradient in the form that optimizers take."""
    if not isinstance(sent, (tuple, list)):
        return sent
    return tf.IndexedSlices(*sent, tf.constant(shape.as_list(), sent[1].dtype)) if sent else None
