"""Run a worker's part of one global batch without side effects, so that it may run twice and count once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.steps import local
from gpudist_core.upstream import models, randomness, strategies

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
        self._place, self._replicas, self._replica = place, parts, place["part"]

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
