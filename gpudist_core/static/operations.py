"""Look up, gather and multiply on a table of which each replica holds a slice, in the replicas of a step.

A replica asks for rows that other replicas hold. So a lookup has two exchanges. First every replica gives its ids to all
(give). Then each replica looks up, in its own slice, the ids of all that it holds, puts zeros in the places of the others,
and the replicas add these blocks up: each takes the places of its own ids from the sum (deal). A product works alike, with
the rows of x in place of the ids.

The two exchanges are each other's gradients. The total loss is the sum over the replicas, and each replica differentiates
its own share. What a replica's rows do to the losses of all replicas comes back to it, and what the rows of all do to a
slice reaches the slice. So the gradient of a slice is complete on its replica: it must not be summed over the replicas
again (`gradients.sum_with` leaves out what `is_sharded`).

Both exchanges are all-reduces of one block, in which every replica has places for the largest number of rows of any replica
(`Exchange`). What else could be used, and why it is not:

- An all-to-all would send each id to the one replica that holds the row. tf.distribute has none.
- An all_gather takes parts of different length. But an all-reduce is the only collective that every strategy supports, in
  graphs and eagerly (2.21: an eager all_gather is traced in each call, 237 ms instead of 50 ms; in a graph both take 0.7 ms
  on 1x4; with NCCL and hierarchical copy all_gather falls back to one device).
- Parts of a fixed size, given by the user, would need no exchange of sizes. But the last batch is smaller, and ragged
  inputs have another number of ids in each step. Where all replicas are on this host and know their numbers while the step
  is traced, there is no such exchange either (`_known_most`).

An id outside of the table is an error on every replica, or none. TensorFlow itself raises on a CPU and reads zeros on a
GPU. And the replica that holds no such row cannot know. So a bad id is replaced by a mark before the ids are given, all
replicas see the mark, and all raise in the same step: otherwise the others would wait in the next collective for the one
that has failed.

Every replica must take part in each exchange, also with no rows. And a shape that is known while the step is traced stays
known: `set_shape` restores what padding and reshaping lose, as the layers above build their variables from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.gradients import all_reduce
from gpudist_core.upstream.runtime import merges


@dataclass(frozen=True)
class ShardInfo:
    """Describe how a table is split over the replicas.

    Attributes:
        axis: The dimension that is split.
        rows: The size of the whole table along that dimension.
        total_replicas: Number of replicas on all hosts.

    Example:
        >>> ShardInfo(axis=0, rows=10, total_replicas=4).span(3)
        (9, 10)
    """

    axis: int  # counted from 0
    rows: int  # 1 or more; the spans of the replicas, in order, are the rows from 0 up to here
    total_replicas: int

    @property
    def height(self) -> int:
        """Return the allocated height of each slice, equal on all replicas. Unused rows are padding that is never read."""
        return -(-self.rows // self.total_replicas)

    def span(self, replica: int) -> tuple[int, int]:
        """Return the first row of a replica and the first row after its last.

        Args:
            replica: The replica's number, counted over all hosts.

        Returns:
            (start, stop), equal if the replica holds no rows.
        """
        return min(self.rows, replica * self.height), min(self.rows, (replica + 1) * self.height)


def checked_axis(axis: int, shape: tuple[int, ...]) -> int:
    """Return the number of an axis, counted from 0."""
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        raise UsageError("axis must be an axis of the tensor", "Axes count from 0.", axis=axis, shape=shape)
    return axis % len(shape)


def without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])


_BAD = -1
"""An id that is never valid, among ids from 1 on: 0 stands in places without an id."""


def gather(variable: Any, info: ShardInfo, size: int, ids: Any, axis: int, replica: int) -> Any:
    """Gather from a whole table, like `tf.gather`.

    Args:
        variable: This replica's slice.
        info: How the table is split.
        size: The table's size along `axis`.
        ids: Numbers along `axis`, an integer tensor of any shape.
        axis: The dimension to gather along.
        replica: This replica's number.

    Returns:
        The same as `tf.gather(table, ids, axis=axis)`.
    """
    ids = dense(ids)
    if not ids.dtype.is_integer:
        raise UsageError("Ids must be integers", "Cast them.", ids=ids.dtype.name)
    flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
    if info.total_replicas == 1:
        rows = _to_front(tf.gather(variable, known(flat, size), axis=axis), axis)
    else:
        rows = _from_all(variable, info, size, flat, axis, replica)
    outer, inner = _sizes(ids), _sizes(rows)[1:]
    rows = tf.reshape(rows, [*outer, *inner] if isinstance(outer, list) else tf.concat([outer, inner], 0))
    rows.set_shape(ids.shape.concatenate(rows.shape[ids.shape.rank :]))
    if not axis:
        return rows
    # The dimensions of the ids belong at the position of the axis.
    rest = range(ids.shape.rank, rows.shape.rank)
    return tf.transpose(rows, [*rest[:axis], *range(ids.shape.rank), *rest[axis:]])


def _from_all(variable: Any, info: ShardInfo, size: int, ids: Any, axis: int, replica: int) -> Any:
    exchange = Exchange(_sizes(ids)[0], replica, info.total_replicas)
    wanted = exchange.give(tf.where((ids >= 0) & (ids < size), ids + 1, tf.constant(_BAD, tf.int64)))
    wanted = _checked(wanted, _on_this_host(tf.reduce_all(wanted > _BAD)), size)  # every replica sees every id: all raise
    if axis != info.axis:
        rows = _to_front(tf.gather(variable, tf.maximum(wanted - 1, 0), axis=axis), axis)
        return exchange.deal(_placed(rows, info, info.axis + (1 if info.axis < axis else 0), replica))
    start, stop = info.span(replica)
    own = wanted - (1 + start)
    here = tf.where((own >= 0) & (own < stop - start))
    rows = _to_front(tf.gather(variable, tf.gather_nd(own, here), axis=axis), axis)
    block = tf.scatter_nd(here, rows, tf.convert_to_tensor([*_sizes(wanted, tf.int64), *rows.shape[1:]], tf.int64))
    block.set_shape([None, *rows.shape[1:]])
    return exchange.deal(block)


def dense(ids: Any) -> Any:
    """Convert ids to a dense tensor.

    Args:
        ids: The ids of a lookup.

    Returns:
        The tensor.

    Raises:
        UsageError: If the ids are ragged or sparse.
    """
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        raise UsageError(
            "Ids must be a dense tensor",
            "Look up ids.values. For ragged ids, tf.ragged.map_flat_values(table.lookup, ids) keeps the rows.",
            ids=type(ids).__name__,
        )
    return tf.convert_to_tensor(ids)


def known(ids: Any, size: int) -> Any:
    """Return the ids, with a check in the step that each is a row of a table of this size."""
    return _checked(ids, tf.reduce_all((ids >= 0) & (ids < size)), size)


def _on_this_host(good: Any) -> Any:
    """Combine the checks of all replicas of this host, and wait until each has finished its check.

    A failed assertion ends the step on its host. If another replica of the host were still in the exchange of the ids, its part
    would be missing on the other hosts, which would wait for it forever.
    """
    context = tf.distribute.get_replica_context()
    here = len(context.strategy.extended.worker_devices)
    if here in (1, context.num_replicas_in_sync):
        return good

    def of_all(strategy: tf.distribute.Strategy, good: Any) -> Any:
        return tf.reduce_all(tf.stack(strategy.experimental_local_results(good)))

    return context.merge_call(of_all, args=(good,))


def _checked(ids: Any, good: Any, size: int) -> Any:
    """Assert that the ids are valid: TensorFlow alone raises on a CPU, but silently reads zeros on a GPU."""
    text = f"An id must be a row of the table: 0 <= id < {size}."
    with tf.control_dependencies([tf.debugging.Assert(good, [text])]):
        return tf.identity(ids)


def matmul(variable: Any, info: ShardInfo, cols: int, x: Any, replica: int) -> Any:
    """Compute `x @ table` for a whole table of rank 2.

    Args:
        variable: This replica's slice.
        info: How the table is split.
        cols: The table's number of columns.
        x: A tensor of the table's dtype, shape (..., rows of the table).
        replica: This replica's number.

    Returns:
        Shape (..., cols).
    """
    x = tf.convert_to_tensor(x, variable.dtype)
    if info.total_replicas == 1:
        return tf.matmul(x, variable)
    flat = tf.reshape(x, [-1, x.shape[-1]])
    exchange = Exchange(_sizes(flat)[0], replica, info.total_replicas)
    of_all = exchange.give(flat)
    start, stop = info.span(replica)
    if info.axis == 0:
        part = tf.matmul(of_all[:, start:stop], variable if stop - start == info.height else variable[: stop - start])
    else:
        part = _placed(tf.matmul(of_all, variable), info, 1, replica)
    result = tf.reshape(exchange.deal(part), [*_sizes(x)[:-1], cols])
    result.set_shape([*x.shape[:-1], cols])
    return result


def _placed(block: Any, info: ShardInfo, axis: int, replica: int) -> Any:
    """Return a slice at its place in the whole table, surrounded by zeros and without its padding."""
    start, stop = info.span(replica)
    rank = block.shape.rank
    inner = tf.slice(block, [0] * rank, [stop - start if dim == axis else -1 for dim in range(rank)])
    return tf.pad(inner, [[start, info.rows - stop] if dim == axis else [0, 0] for dim in range(rank)])


def _sizes(tensor: Any, dtype: Any = None) -> Any:
    """Return a tensor's shape as a list, with integers for known sizes, so that the step computes nothing for them.

    If the rank is unknown, return a tensor.
    """
    if tensor.shape.rank is None:
        return tf.shape(tensor)
    return [tf.shape(tensor, dtype or tf.int32)[dim] if size is None else size for dim, size in enumerate(tensor.shape)]


def _to_front(values: Any, axis: int) -> Any:
    if not axis:
        return values
    return tf.transpose(values, [axis, *(dim for dim in range(values.shape.rank) if dim != axis)])


class Exchange:
    """Exchange rows between all replicas once. Every replica must make it, also with 0 rows.

    Args:
        rows: Number of rows of this replica: an integer if it is known, else an integer scalar tensor.
        replica: This replica's number.
        total: Number of replicas on all hosts.
    """

    def __init__(self, rows: Any, replica: int, total: int) -> None:
        # 0 <= self.rows <= most, and most is equal on all replicas: places [first, first + rows) of [0, last) are this one's.
        self.rows = rows if isinstance(rows, int) else tf.cast(rows, tf.int32)
        most = _known_most(rows)
        assert most is None or not isinstance(rows, int) or rows <= most
        if most is None:
            mine = tf.one_hot(replica, total, dtype=tf.int64) * tf.cast(self.rows, tf.int64)
            most = tf.cast(tf.reduce_max(all_reduce(mine)), tf.int32)
        self._first = replica * most
        self._last = total * most

    def give(self, values: Any) -> Any:
        """Give this replica's rows to all replicas.

        Args:
            values: Shape (rows, ...).

        Returns:
            The rows of all replicas, shape (places, ...), equal on all; 0 in places without a row.
        """
        if not values.dtype.is_floating:
            return self._give(values)
        run = tf.custom_gradient(lambda x: (self._give(x), self._deal))
        return run(values)

    def deal(self, block: Any) -> Any:
        """Sum the values of all replicas in each place, and return the places of this replica's own rows.

        Args:
            block: Shape (places, ...).

        Returns:
            Shape (rows, ...).
        """
        if not block.dtype.is_floating:
            return self._deal(block)
        run = tf.custom_gradient(lambda x: (self._deal(x), self._give))
        return run(block)

    def _give(self, values: Any) -> Any:
        around = [[self._first, self._last - self._first - self.rows], *([[0, 0]] * (values.shape.rank - 1))]
        block = all_reduce(tf.pad(values, around))
        block.set_shape([None, *values.shape[1:]])
        return block

    def _deal(self, block: Any) -> Any:
        return all_reduce(block)[self._first : self._first + self.rows]


def _known_most(rows: Any) -> int | None:
    """Return the largest number of rows of any replica if all are on this host and know theirs. That saves one exchange."""
    context = tf.distribute.get_replica_context()
    if len(context.strategy.extended.worker_devices) < context.num_replicas_in_sync or not merges(context.strategy):
        return None

    def of_all(strategy: tf.distribute.Strategy, rows: Any) -> Any:
        each = strategy.experimental_local_results(rows)
        return max(each) if all(isinstance(number, int) for number in each) else None

    most: int | None = context.merge_call(of_all, args=(rows,))
    return most
