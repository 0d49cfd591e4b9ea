"""Compute this replica's share of a step: its number of examples, and their place in the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from gpudist_core.gradients import all_reduce
from gpudist_core.state import PerThread
from gpudist_core.upstream import patches

_current: PerThread[Share | None] = PerThread(None)


class Share:
    """Describe one replica's part of the global batch while a step is traced.

    Values that need the other replicas are computed once, on first use.

    Args:
        rows: Number of examples of this replica: an int32 scalar tensor, 0 or more.
        replica: The number of this replica. Default: the number from the replica context, which is a constant in the graph.
        counts: Number of examples of each replica: float32, shape (replicas,). Default: computed by an all-reduce.

    Attributes:
        rows: Number of examples of this replica.
        replica: The number of this replica, counted over all hosts.
        num_replicas: The number of replicas on all hosts.
        added_losses: The losses that each layer added, by the layer's id.
    """

    def __init__(self, rows: Any, replica: Any = None, counts: Any = None) -> None:
        context = tf.distribute.get_replica_context()
        self.rows = rows
        self._graph = tf.compat.v1.get_default_graph()
        self.added_losses: dict[int, list[Any]] = {}
        self.num_replicas = 1 if context is None else int(context.num_replicas_in_sync)
        here = 0 if context is None else context.replica_id_in_sync_group
        self.replica = here if replica is None else replica
        self._counts: Any = counts
        self._total: Any = None

    @property
    def total(self) -> Any:
        """Return the number of examples in the global batch: a float32 scalar."""
        if self._total is not None:
            return self._total
        total = tf.reduce_sum(self._counts) if self._counts is not None else all_reduce(self._own())
        if self.can_meet():  # a tensor of an inner function is not one of the step
            self._total = total
        return total

    @property
    def fraction(self) -> Any:
        """Return this replica's fraction of the global batch: a float64 scalar. The fractions of all replicas sum to 1."""
        # Rounded to float32 it has the same bits as a quotient of float32 numbers.
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(self.total, tf.float64))

    @property
    def first(self) -> Any:
        """Return the index of this replica's first example in the global batch: an int32 scalar."""
        if self.num_replicas == 1:
            return tf.constant(0)
        before = tf.range(self.num_replicas) < self.replica
        return tf.cast(tf.reduce_sum(tf.where(before, self.counts, 0.0)), tf.int32)

    @property
    def counts(self) -> Any:
        """Return the number of examples of each replica: float32, shape (replicas,)."""
        if self._counts is None:
            mine = tf.one_hot(self.replica, self.num_replicas, dtype=tf.float32)
            self._counts = all_reduce(mine * self._own())
        return self._counts

    def can_meet(self) -> bool:
        """Return whether a collective is possible here. It is not in a loop, branch or function inside the step."""
        return tf.compat.v1.get_default_graph() is self._graph

    def _own(self) -> Any:
        return tf.cast(self.rows, tf.float32)


@contextlib.contextmanager
def sharing(share: Share) -> Iterator[Share]:
    """Set the share that the code traced by this thread uses. Meanwhile `patches.of_step` are installed."""
    with patches.of_step, _current.set(share):
        yield share


def outside() -> contextlib.AbstractContextManager[Any]:
    """Trace code that does not depend on the examples of a step."""
    return _current.set(None)


def current() -> Share | None:
    """Return the share of the step that this thread traces, or None outside a step."""
    return _current.value


def rows_of(batch: Any) -> Any:
    """Return the number of examples in a batch: the leading dimension of its first tensor that has one.

    Args:
        batch: A nested structure of tensors. The first one has shape (rows, ...).

    Returns:
        An int32 scalar tensor.
    """
    for value in tf.nest.flatten(batch):
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return tf.cast(value.nrows() if isinstance(value, tf.RaggedTensor) else value.dense_shape[0], tf.int32)
        if value is not None and value.shape.rank != 0:
            return tf.shape(value)[0] if value.shape[0] is None else tf.constant(value.shape[0])
    return tf.constant(1)
