"""This replica's share of a step: how many rows of the global batch it has, and where they stand in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from gpudist_core.gradients.reduction import all_reduce

_current = threading.local()


class Share:
    """What one replica has of the global batch, while a step is traced; what needs the others is asked for once.

    Args:
        rows: Rows of this replica: an int32 scalar tensor; may be 0.
        replica: The number of this replica, where the context's would be a constant in a graph that all replicas use.
        counts: Rows of each replica, float32 of shape (replicas,), where they are known without asking the others.

    Attributes:
        rows: The same.
        added_losses: What each layer, by its id, has added to the loss.
    """

    def __init__(self, rows: Any, replica: Any = None, counts: Any = None) -> None:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        self.rows = rows
        self._graph = tf.compat.v1.get_default_graph()
        self.added_losses: dict[int, list[Any]] = {}
        self._replicas = 1 if context is None else int(context.num_replicas_in_sync)
        here = 0 if context is None else context.replica_id_in_sync_group
        self._replica = here if replica is None else replica
        self._counts: Any = counts
        self._total: Any = None

    @property
    def total(self) -> Any:
        """Rows of the global batch: a float32 scalar."""
        import tensorflow as tf

        if self._total is None:
            self._total = tf.reduce_sum(self._counts) if self._counts is not None else all_reduce(self._own())
        return self._total

    @property
    def fraction(self) -> Any:
        """Rows of this replica / rows of the global batch: a float32 scalar; over the replicas they sum to one."""
        import tensorflow as tf

        return tf.math.divide_no_nan(self._own(), self.total)

    @property
    def first(self) -> Any:
        """The place of this replica's first row in the global batch: an int32 scalar."""
        import tensorflow as tf

        if self._replicas == 1:
            return tf.constant(0)
        before = tf.range(self._replicas) < self._replica
        return tf.cast(tf.reduce_sum(tf.where(before, self.counts, 0.0)), tf.int32)

    @property
    def counts(self) -> Any:
        """Rows of each replica: float32 of shape (replicas,)."""
        import tensorflow as tf

        if self._counts is None:
            mine = tf.one_hot(self._replica, self._replicas, dtype=tf.float32)
            self._counts = all_reduce(mine * self._own())
        return self._counts

    @property
    def replica(self) -> Any:
        """The number of this replica, counted over all hosts."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """Replicas in all."""
        return self._replicas

    def can_meet(self) -> bool:
        """Whether replicas can wait for each other in what is traced now: not in loops, branches and functions of the step."""
        import tensorflow as tf

        return tf.compat.v1.get_default_graph() is self._graph

    def _own(self) -> Any:
        import tensorflow as tf

        return tf.cast(self.rows, tf.float32)


@contextlib.contextmanager
def sharing(share: Share) -> Iterator[Share]:
    """Make it the share of what this thread traces."""
    outer = current()
    _current.share = share
    try:
        yield share
    finally:
        _current.share = outer


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """While this thread traces what has nothing to do with the rows of a step."""
    outer = current()
    _current.share = None
    try:
        yield
    finally:
        _current.share = outer


def current() -> Share | None:
    """The share of the step that this thread traces, or None outside one."""
    return getattr(_current, "share", None)


def rows_of(batch: Any) -> Any:
    """Rows of a batch: the leading dimension of its first tensor that has one.

    Args:
        batch: A nested structure of tensors, the first of shape (rows, ...).

    Returns:
        An int32 scalar tensor.
    """
    import tensorflow as tf

    for value in tf.nest.flatten(batch):
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return tf.cast(value.nrows() if isinstance(value, tf.RaggedTensor) else value.dense_shape[0], tf.int32)
        if value is not None and value.shape.rank != 0:
            return tf.shape(value)[0] if value.shape[0] is None else tf.constant(value.shape[0])
    return tf.constant(1)
