"""Make tables of which each device keeps one slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.static import context, memory
from gpudist_core.static.info import ShardInfo, checked_axis, without
from gpudist_core.static.initializers import Initializer, check_initializer
from gpudist_core.static.room import check_room
from gpudist_core.static.sharded import ShardedTable
from gpudist_core.static.sources import Source, numeric, source_of
from gpudist_core.upstream import static as upstream
from gpudist_core.upstream import strategies

_TOO_LARGE = "Use more devices, so that each slice is smaller, or use a smaller dtype."


def shard(
    tensor: Any,
    strategy: tf.distribute.Strategy,
    axis: int = 0,
    *,
    trainable: bool = False,
    name: str | None = None,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    initializer: Initializer | None = None,
) -> ShardedTable:
    """Keep one slice of a table on each device.

    If the table has fewer rows than replicas, the last replicas hold none. So the same program runs on every topology.

    Args:
        tensor: The values as for `replicate`, or None with an initializer. Each host passes all values and keeps its slices.
        strategy: A mirrored strategy, on one host or several, or one device. Under `CentralStorageStrategy` the table is in one
            piece, where the strategy keeps its variables.
        axis: The dimension to split.
        trainable: Whether gradient tapes watch it.
        name: A name. Default: `sharded`.
        dtype: The dtype on the devices. Default: the tensor's dtype; float32 with an initializer.
        shape: The whole shape. Needed for chunks and initializers.
        initializer: A function of (start, (count, *rest)) that returns `count` rows from `start` along the axis, with the axis
            first. It must depend on the row numbers only, so that every topology starts from the same table. See `uniform`.

    Returns:
        The table, for `lookup`, `gather` and `matmul` in steps.

    Raises:
        UsageError: If the axis does not exist, the values are not numbers, or chunks do not fill the shape; inside a step.
        Unavailable: If a slice does not fit into memory. Then nothing was allocated.

    Example:
        >>> table = shard(np.arange(6.0).reshape(3, 2), tf.distribute.get_strategy())
        >>> table.lookup([2, 0]).numpy().tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    if (tensor is None) == (initializer is None):
        raise UsageError(
            "A table needs either a tensor or an initializer",
            tensor=None if tensor is None else type(tensor).__name__,
            initializer=initializer,
        )
    if initializer is not None:
        check_initializer(initializer)
    context.check_not_in_a_step("A table")
    source = _unfilled(shape, dtype) if initializer is not None else source_of(tensor, shape, dtype)
    table = allocate(source, strategy, axis, lambda lay: _variable(lay, source.dtype, trainable, name or "sharded"))
    if initializer is not None:
        initialize(table, initializer)
    else:
        for start, rows in source.pieces():
            table.place((start, *(0,) * (rows.ndim - 1)), rows)
    return table


def allocate(
    source: Source, strategy: tf.distribute.Strategy, axis: int, create: Callable[[tuple[int, ...]], Any]
) -> ShardedTable:
    """Allocate a table of zeros if it fits into memory.

    Args:
        source: Its shape and dtype.
        strategy: The strategy.
        axis: The dimension to split.
        create: A function that makes the variable of a slice's shape.

    Returns:
        The table.

    Raises:
        UsageError: If the axis does not exist.
        Unavailable: If it does not fit into memory.
    """
    replicas = context.check_strategy(strategy, "gd.shard")
    in_one_piece = strategies.is_central(strategy)
    shape = source.shape
    info = ShardInfo(checked_axis(axis, shape), shape[axis], 1 if in_one_piece else replicas.total)
    if not info.rows:
        raise UsageError("A table must have at least one row to split", "Pass a table with rows.", shape=shape, axis=axis)
    lay = info.slice_shape(shape)
    size = int(np.prod(lay, dtype=np.int64)) * source.dtype.itemsize
    devices = strategy.extended.parameter_devices if in_one_piece else replicas.devices
    check_room(dict.fromkeys(devices, size), _TOO_LARGE)
    zeros = functools.partial(memory.zeros, lay, source.dtype)
    if info.total_replicas > 1:
        creation = upstream.unmirrored(strategy, zeros)
    else:
        creation = tf.variable_creator_scope(
            lambda create, **kwargs: create(**{**kwargs, "initial_value": lambda: zeros(devices[0])})
        )
    with strategy.scope(), creation:
        return ShardedTable(create(lay), strategy, info, shape)


def initialize(table: ShardedTable, initializer: Initializer) -> None:
    """Fill this host's slices with an initializer.

    Args:
        table: The table.
        initializer: As for `shard`.
    """
    rest = without(table.shape, table.info.axis)
    table.restore_slices(
        lambda start, stop: np.moveaxis(np.asarray(initializer(start, (stop - start, *rest))), 0, table.info.axis)
    )


def _variable(lay: tuple[int, ...], dtype: Any, trainable: bool, name: str) -> Any:
    return tf.Variable(lambda: tf.zeros(lay, dtype), trainable=trainable, name=name)


def _unfilled(shape: Sequence[int] | None, dtype: Any) -> Source:
    if shape is None:
        raise UsageError("An initializer needs the whole shape", "Give shape=(rows, ...).", shape=shape)
    return Source(tuple(int(size) for size in shape), numeric(dtype or "float32"), lambda: iter(()))
