"""What a worker does: its part of one global batch, leaving no trace, so that it may be done twice and counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import WrongUse
from gpudist_core.steps import local
from gpudist_core.upstream import coordination, models, randomness

Part = dict[str, Any]
"""The sums of some rows: `grads` (for each variable a tensor, a pair (values, indices), () for none), `loss`, `weight`; where
the model has losses of its inputs, besides `own_grads`, `own_loss` and `rows`, which are divided by rows instead."""


class PartOfBatch(shares.Share):
    """A share of which the coordinator knows the place: workers need not ask each other.

    Args:
        place: `rows`, `first`, `total` and `part` of this share: int32 scalars.
        parts: How many shares the batch has.
    """

    def __init__(self, place: dict[str, Any], parts: int) -> None:
        super().__init__(place["rows"])
        self._place, self._replicas, self._replica = place, parts, place["part"]

    @property
    def total(self) -> Any:
        """Rows of the global batch: a float32 scalar."""
        return tf.cast(self._place["total"], tf.float32)

    @property
    def first(self) -> Any:
        """The place of this share's first row in the global batch: an int32 scalar."""
        return self._place["first"]


class Work:
    """The function that workers are sent.

    Args:
        model: What is called.
        variables: What the gradients are of, partitioned ones in their parts.
        loss: (y, y_pred) -> losses of shape (rows, ...).
        scale: The optimizer's loss scaling, or None.
        draws: As in `TrainStep`.
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
        """The concrete function for batches of this shape.

        Returns:
            A `ConcreteFunction`.

        Args:
            batch: (x, y) or (x, y, weight).
            place: `rows`, `first`, `total`, `part` (int32) and `item` (int64): scalar tensors.
            parts: How many shares the batch has.
        """
        if parts not in self._functions:
            self._functions[parts] = tf.function(functools.partial(self._part, parts), autograph=False)
        return self._functions[parts].get_concrete_function(batch, place)

    def draws_of(self, function: Any) -> dict[int, tuple[Any, int]]:
        """What a traced function draws from Keras's seed generators."""
        return self._seeds.get(id(function.graph), {})

    def check_writes_nothing(self, function: Any) -> None:
        """Refuse a forward pass that changes variables: on several workers it would do so several times, in any order.

        Args:
            function: What `traced` returned.

        Raises:
            WrongUse: Where it does.
        """
        written = _written(function)
        if written:
            raise WrongUse(
                "A lock-step model must not change variables in its forward pass",
                "Replace the layer (BatchNormalization by LayerNormalization, say), or use "
                'CoordinatedTraining(schedule="asynchronous").',
                variables=written,
            )

    def _part(self, parts: int, batch: tuple[Any, ...], place: dict[str, Any]) -> Part:
        x, y, weight = local.unpack(randomness.with_unknown_rows(self._draws, batch, parts))
        with (
            shares.sharing(PartOfBatch(place, parts)) as share,
            randomness.drawing(self._draws),
            coordination.reading_seeds(place["item"]) as seeds,
        ):
            result = self._sums(share, x, y, weight)
        self._seeds[id(tf.compat.v1.get_default_graph())] = seeds.draws
        return result

    def _sums(self, share: shares.Share, x: Any, y: Any, weight: Any) -> Part:
        scale = None if self._scale is None else self._scale(tf.constant(1.0))
        rows = tf.cast(share.rows, tf.float32)
        with tf.GradientTape(persistent=True) as tape:
            y_pred = models.call(self._model, x)
            loss, total = local.weighted_losses(self._loss, y, y_pred, weight)
            of_variables, of_inputs = local.separate(self._model, getattr(self._model, "losses", []))
            if of_variables is not None:
                loss += of_variables * total
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
    """Gradients as a `Part` has them: RemoteValue takes no None."""
    return [() if g is None else (g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def _written(function: Any) -> list[str]:
    """The names of the variables that a concrete function writes; inside functions that it calls, of the operations that do."""
    names = {id(inner): _name(outer, function) for outer, inner in function.graph.captures}
    top = [names.get(id(op.inputs[0]), op.name) for op in function.graph.get_operations() if _writes(op.type)]
    called = [node for inner in function.graph.as_graph_def().library.function for node in inner.node_def]
    return sorted({*top, *(node.name for node in called if _writes(node.op))})


def _writes(operation: str) -> bool:
    return operation.startswith(("Assign", "ResourceScatter"))


def _name(captured: Any, function: Any) -> str:
    return next((str(v.name) for v in function.graph.variables if getattr(v, "handle", None) is captured), "a variable")
