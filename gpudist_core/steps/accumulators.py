"""Keep sums over several batches on each replica until they make an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gpudist_core import gradients
from gpudist_core.static import ShardedTable
from gpudist_core.upstream import strategies


class Accumulators:
    """Keep one dense sum for each trained variable, and one for the weight. Each replica adds to its own copy.

    Args:
        strategy: The strategy of the trained variables.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        # These have an element for each trained variable, in the order of the gradients, once the sums are built.
        self._sums: list[Any] = []
        self._given: list[bool] = []  # whether it ever had a gradient: without one it gets None, not zeros
        self._tables: list[ShardedTable | None] = []
        self._weight: Any = None

    @property
    def is_built(self) -> bool:
        """Return whether the sums exist already."""
        return self._weight is not None

    def build(self, variables: list[Any]) -> None:
        """Create the sums in the strategy's scope. A second call does nothing.

        Args:
            variables: The trained variables.
        """
        if self.is_built:
            return
        with self._strategy.scope():
            is_wide = any(tf.as_dtype(v.dtype) == tf.float64 for v in variables)
            self._weight = _variable((), tf.float64 if is_wide else tf.float32)
            self._sums = [_variable(v.shape, v.dtype) for v in variables]
        self._given = [False] * len(variables)
        for variable, kept in zip(variables, self._sums, strict=True):
            table = None
            if gradients.is_sharded(variable):  # each replica adds to its own slice
                info, shape = gradients.shard_of(variable), list(kept.shape)
                shape[info.axis] = info.rows
                table = ShardedTable(kept, self._strategy, info, tuple(shape))
            self._tables.append(table)

    def add(self, grads: list[Any], weight: Any) -> None:
        """Add this replica's sums, in a replica's context.

        Args:
            grads: A gradient for each variable; None adds nothing.
            weight: A scalar.
        """
        for place, (kept, gradient) in enumerate(zip(self._sums, grads, strict=True)):
            if gradient is not None:
                self._given[place] = True
                kept.assign_add(tf.convert_to_tensor(gradient))
        self._weight.assign_add(self._in_dtype(weight))

    def nothing_more(self) -> list[Any]:
        """Return gradients for `take` if no batch comes: zeros, and None for variables that never had a gradient."""
        return [
            tf.zeros(kept.shape, kept.dtype) if given else None for kept, given in zip(self._sums, self._given, strict=True)
        ]

    def take(self, grads: list[Any], weight: Any) -> tuple[list[Any], Any]:
        """Return the kept sums plus the given ones, and reset the kept sums.

        Args:
            grads: A gradient for each variable, or None.
            weight: A scalar.

        Returns:
            Dense gradients (None stays None) and the weight.
        """
        sums = [g if g is None else self._own(kept) + g for kept, g in zip(self._sums, grads, strict=True)]
        total = self._own(self._weight) + self._in_dtype(weight)
        with tf.control_dependencies([total, *(s for s in sums if s is not None)]):
            for kept in [*self._sums, self._weight]:
                kept.assign(tf.zeros_like(kept))
        return sums, total

    def drop(self) -> None:
        """Discard the kept sums."""
        for kept in [*self._sums, self._weight]:
            kept.assign(tf.zeros(kept.shape, kept.dtype))

    def state(self) -> dict[str, Any]:
        """Return the kept sums, added over all replicas.

        Returns:
            `weight` (a number) and, for each variable, `sums` (an array; for a sharded table the whole table) and `given`
            (whether it had a gradient).
        """
        sums = [
            kept.read_value().numpy() if table is None else table.as_numpy()
            for kept, table in zip(self._sums, self._tables, strict=True)
        ]
        return {"weight": self._weight.read_value().numpy(), "sums": sums, "given": list(self._given)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the sums so that their total over the replicas is the saved state: the first replica gets it, the others zero.

        Args:
            state: The result of `state`.
        """
        for kept, table, value in zip(self._sums, self._tables, state["sums"], strict=True):
            if table is None:
                kept.assign(value)
            else:
                table.assign_rows(0, value)
        self._weight.assign(state["weight"])
        self._given = [bool(given) for given in state.get("given", [True] * len(self._sums))]

    def _own(self, kept: Any) -> Any:
        """Return this replica's part. If all replicas share the variable, each takes an equal part."""
        value = kept.read_value()
        return value / self._strategy.num_replicas_in_sync if strategies.is_shared(kept) else value

    def _in_dtype(self, weight: Any) -> Any:
        return tf.cast(weight, self._weight.dtype) if tf.is_tensor(weight) else weight


def _variable(shape: Any, dtype: Any) -> Any:
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
