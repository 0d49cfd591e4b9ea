"""One slice of a table on each device, for tables larger than a device.

The slices are the components of one mirrored variable of a slice's shape, each given other values, and collectives in
replica context bring together what a step needs of them. So the table works with every loop, optimizer and gradient tape that
works with tf.distribute, on one host and across hosts; its optimizer slots are sliced with it; and a lookup's gradient is
`tf.IndexedSlices` of the rows that this slice was asked for. DTensor, the alternative, has dense gradients only, does not mix
with tf.distribute in one step, and Keras 3 does not know it (`keras.distribution` does nothing on TensorFlow).

CentralStorageStrategy keeps every variable in the host's memory, once for all devices. So a table lies there in one piece, an
ordinary variable of the strategy, and the same program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gpudist_core.errors import WrongUse
from gpudist_core.replicas import replicas_of
from gpudist_core.static import context, memory, operations
from gpudist_core.static.info import ShardInfo
from gpudist_core.static.initializers import Initializer, check_initializer
from gpudist_core.static.room import check_room
from gpudist_core.static.sources import PIECE_BYTES, Source, exactly, numeric, source_of
from gpudist_core.upstream import central_storage
from gpudist_core.upstream import static as upstream
from gpudist_core.values import is_whole

Array = NDArray[Any]
_TOO_LARGE = "Use more devices, each of which holds a smaller slice, or a smaller dtype."


class ShardedTable:
    """A table of which each replica holds one slice; `shard` makes it.

    Args:
        variable: A distributed `tf.Variable` of a slice's shape, or the Keras variable around it.
        strategy: The strategy whose replicas hold the slices.
        info: Which replica holds what.
        shape: The shape of the whole table.

    Attributes:
        variable: What an optimizer trains: another slice on each replica. It carries `_gpudist_shard`; its local gradient is
            the total of the slice.
        strategy: The strategy whose replicas hold the slices.
        info: Which replica holds what.
        shape: The shape of the whole table.
    """

    def __init__(self, variable: Any, strategy: Any, info: ShardInfo, shape: tuple[int, ...]) -> None:
        self.variable = variable
        self.strategy = strategy
        self.info = info
        self.shape = shape
        for one in {id(one): one for one in (variable, self._tf)}.values():
            one._gpudist_shard = info
        self._read_piece: Any = None

    @property
    def _tf(self) -> Any:
        """The tf.Variable, also where a Keras variable is around it."""
        value = getattr(self.variable, "value", None)
        return self.variable if callable(value) or value is None else value

    @property
    def dtype(self) -> Any:
        """The table's dtype."""
        return self._tf.dtype

    @property
    def name(self) -> str:
        """The variable's name."""
        return str(self.variable.name).removesuffix(":0")

    @property
    def slices(self) -> tuple[Any, ...]:
        """This host's slices, each a `tf.Variable` on its device, in the order of the replicas."""
        return tuple(self.strategy.experimental_local_results(self._tf))

    def _slice(self, replica: int) -> Any:
        """A replica's own variable: a gather from the mirrored one would read, and so copy, all of it (TensorFlow 2.21)."""
        return self.slices[replica - replicas_of(self.strategy).first]

    def _replica(self, what: str) -> int:
        if self.info.total_replicas == 1:
            return 0
        replica = context.replica_in(self.strategy)
        if replica is None:
            raise WrongUse(
                f"{what} needs all replicas of the table's own strategy at once",
                "Call it inside strategy.run; table.as_numpy() and table.read() give the values outside.",
                strategy=type(self.strategy).__name__,
                replicas=self.info.total_replicas,
            )
        return replica

    @tf.autograph.experimental.do_not_convert
    def lookup(self, ids: Any) -> Any:
        """Rows of the table, in a step; every replica calls it, each with its own ids.

        Args:
            ids: Row numbers of any integer dtype and shape, of another number on each replica, also none.

        Returns:
            A tensor of shape (*ids.shape, *shape[1:]). An id that is no row raises `tf.errors.InvalidArgumentError` on all
            replicas.
        """
        return self.gather(ids)

    @tf.autograph.experimental.do_not_convert
    def gather(self, ids: Any, axis: int = 0) -> Any:
        """As `tf.gather(table, ids, axis=axis)`, in a step.

        Args:
            ids: Numbers along the axis, of any integer dtype and shape, of another number on each replica, also none.
            axis: The dimension to gather along; it need not be the one that is split.

        Returns:
            A tensor of shape (*shape[:axis], *ids.shape, *shape[axis + 1:]).
        """
        axis = _axis(axis, self.shape)
        if upstream.is_symbolic():
            return self._symbol(self.shape[:axis], ids, self.shape[axis + 1 :])
        replica = self._replica("ShardedTable.gather")
        with context.meeting("ShardedTable.gather"):
            return operations.gather(self._slice(replica), self.info, self.shape[axis], ids, axis, replica)

    @tf.autograph.experimental.do_not_convert
    def matmul(self, x: Any) -> Any:
        """`x @ table`, in a step; every replica calls it, each with its own x.

        Args:
            x: A tensor of the table's dtype and shape (..., rows of the table).

        Returns:
            A tensor of shape (..., columns of the table).

        Raises:
            WrongUse: When the table is not of rank 2, or x has not its rows as columns.
        """
        size = getattr(x, "shape", (None,))[-1]
        if len(self.shape) != 2 or size != self.shape[0]:
            raise WrongUse("x @ table needs x of shape (..., rows)", "Mend the shapes.", x=size, table=self.shape)
        if upstream.is_symbolic():
            return self._symbol((), x[..., 0], self.shape[1:])
        replica = self._replica("ShardedTable.matmul")
        with context.meeting("ShardedTable.matmul"):
            return operations.matmul(self._slice(replica), self.info, self.shape[1], x, replica)

    def _symbol(self, before: tuple[int, ...], inner: Any, after: tuple[int, ...]) -> Any:
        """What has the shape of a result: replicas cannot meet while Keras builds a model."""
        inner = tf.convert_to_tensor(inner)
        zeros = tf.zeros(tf.concat([before, tf.shape(inner), after], 0), self.dtype)
        zeros.set_shape([*before, *inner.shape, *after])
        return zeros

    def bytes_per_device(self) -> dict[str, int]:
        """What this host's slices occupy, in bytes, by the device's full name."""
        return {one.device: int(np.prod(one.shape, dtype=np.int64)) * int(one.dtype.size) for one in self.slices}

    def _local(self) -> Iterator[tuple[int, int, Any]]:
        """This host's slices: (start, stop, variable)."""
        first = replicas_of(self.strategy).first
        for k, variable in enumerate(self.slices):
            yield (*self.info.span(first + k), variable)

    def assign_rows(self, start: int, values: Any) -> None:
        """Replace a part of the table along the axis that is split; each host does it with the same values, between steps.

        Args:
            start: Where the part begins along the axis.
            values: Shape of the table but for the axis.

        Raises:
            WrongUse: When it is not a part of the table, or inside a step.
        """
        context.check_eager("ShardedTable.assign_rows")
        axis = self.info.axis
        rows = exactly(values, np.dtype(self.dtype.as_numpy_dtype))
        fits = rows.ndim == len(self.shape) and _without(rows.shape, axis) == _without(self.shape, axis)
        if not fits or not 0 <= start <= self.info.rows - rows.shape[axis]:
            raise WrongUse(
                "Rows to assign must be rows of the table",
                "Mend start or values.",
                start=start,
                values=rows.shape,
                table=self.shape,
            )
        begin = [0] * rows.ndim
        begin[axis] = start
        self.place(tuple(begin), rows)

    def place(self, begin: tuple[int, ...], block: Array) -> None:
        """Write a block of the table into the slices of this host that it meets.

        Args:
            begin: Where the block begins in the table, by dimension.
            block: The values.
        """
        axis = self.info.axis
        for start, stop, variable in self._local():
            low, high = max(start, begin[axis]), min(stop, begin[axis] + block.shape[axis])
            if low < high:
                inner = memory.along(axis, low - begin[axis], high - begin[axis])
                memory.write(variable, (*begin[:axis], low - start, *begin[axis + 1 :]), block[inner])

    def state_slices(self) -> Iterator[tuple[int, Array]]:
        """What this host holds, in pieces that fit in memory: (start along the axis, values).

        Yields:
            The pieces of one slice after the other.
        """
        for start, stop, variable in self._local():
            if self.info.axis == 0:
                yield from ((start + at, rows) for at, rows in memory.read_pieces(variable, stop - start))
            elif start < stop:
                yield start, variable.numpy()[memory.along(self.info.axis, 0, stop - start)]

    def restore_slices(self, reader: Callable[[int, int], Any]) -> None:
        """Fill what this host holds.

        Args:
            reader: Called with (start, stop) along the axis, returns that part of the table; one after the other.
        """
        each = self._rows_per_piece()
        for start, stop, _ in self._local():
            for low in range(start, stop, each):
                self.assign_rows(low, reader(low, min(stop, low + each)))

    def _rows_per_piece(self) -> int:
        size = int(np.prod(_without(self.shape, self.info.axis), dtype=np.int64)) * int(self.dtype.size)
        return max(1, PIECE_BYTES // max(1, size))

    def read(self, chunk: int | None = None) -> Iterator[tuple[int, Array]]:
        """The whole table in order, on every host: (start along the axis, values); with several hosts all of them call it.

        Args:
            chunk: How many rows along the axis at once; about 4 MiB of them unless given.

        Yields:
            The pieces.
        """
        context.check_eager("ShardedTable.read")
        each = chunk or self._rows_per_piece()
        if replicas_of(self.strategy).num_hosts > 1:
            yield from self._read_all(each)
            return
        for start, stop, variable in self._local():
            for low in range(start, stop, each):
                high = min(stop, low + each)
                if self.info.axis == 0:
                    yield low, memory.read(variable, low - start, high - start)
                else:
                    yield low, variable.numpy()[memory.along(self.info.axis, low - start, high - start)]

    def _read_all(self, each: int) -> Iterator[tuple[int, Array]]:
        """From all hosts: each piece is gathered by its numbers along the axis."""
        if self._read_piece is None:
            self._read_piece = tf.function(
                lambda ids: self.strategy.run(lambda: self.gather(ids, axis=self.info.axis)), reduce_retracing=True
            )
        for low in range(0, self.info.rows, each):
            ids = tf.range(low, min(self.info.rows, low + each), dtype=tf.int64)
            yield low, np.asarray(self.strategy.experimental_local_results(self._read_piece(ids))[0])

    def as_numpy(self) -> Array:
        """The whole table in host memory; with several hosts all of them call it."""
        whole = np.empty(self.shape, self.dtype.as_numpy_dtype)
        for start, values in self.read():
            whole[memory.along(self.info.axis, start, start + values.shape[self.info.axis])] = values
        return whole

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> Any:
        raise WrongUse(
            "A table in slices is never one tensor",
            "In a step take lookup, gather or matmul; as_numpy() gathers it on this host.",
            table=self.name,
        )

    def __repr__(self) -> str:
        return f"<ShardedTable {self.name!r} shape={self.shape} dtype={self.dtype.name} {self.info}>"


def shard(
    tensor: Any,
    strategy: Any,
    axis: int = 0,
    *,
    trainable: bool = False,
    name: str | None = None,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    initializer: Initializer | None = None,
) -> ShardedTable:
    """Keep one slice of a table on each device.

    Where there are fewer rows than replicas the last replicas hold none: the same program runs on every topology.

    Args:
        tensor: What `replicate` takes; None where an initializer makes the values. Each host gives all of it, keeps its slices.
        strategy: A mirrored strategy, on one host or several, or one device. Under `CentralStorageStrategy` the table lies in
            one piece where the strategy keeps its variables.
        axis: The dimension that is split.
        trainable: Whether gradient tapes watch it.
        name: A name, `sharded` unless given.
        dtype: The dtype on the devices; the tensor's own unless given, float32 for an initializer.
        shape: The whole shape, needed for chunks and initializers.
        initializer: Called with (start, (count, *rest)): values of `count` rows from `start` along the axis, the axis first.
            It must depend on the rows' numbers alone, so that every topology starts from the same table; `uniform` does.

    Returns:
        The table; `lookup`, `gather` and `matmul` work in steps.

    Raises:
        WrongUse: When the axis does not exist, the values are no numbers, chunks do not make up the shape, or inside a step.
        Unavailable: When a slice does not fit; nothing was allocated then.

    Example:
        >>> table = shard(np.arange(6.0).reshape(3, 2), tf.distribute.get_strategy())
        >>> table.lookup([2, 0]).numpy().tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    if (tensor is None) == (initializer is None):
        raise WrongUse(
            "A table comes of a tensor or of an initializer",
            "Give one of them.",
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


def allocate(source: Source, strategy: Any, axis: int, create: Callable[[tuple[int, ...]], Any]) -> ShardedTable:
    """A table of zeros, if it fits.

    Args:
        source: Its shape and dtype.
        strategy: The strategy.
        axis: The dimension that is split.
        create: Makes the variable of a slice's shape.

    Returns:
        The table.

    Raises:
        WrongUse: When the axis does not exist.
        Unavailable: When it does not fit.
    """
    replicas = context.check_strategy(strategy, "gd.shard")
    in_one_piece = central_storage.is_central(strategy)
    shape = source.shape
    info = ShardInfo(_axis(axis, shape), shape[axis], 1 if in_one_piece else replicas.total)
    if not info.rows:
        raise WrongUse("A table needs a row to split", "Give it rows.", shape=shape, axis=axis)
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
        table = ShardedTable(create(lay), strategy, info, shape)
    central_storage.let_first_assign(table.variable)
    return table


def initialize(table: ShardedTable, initializer: Initializer) -> None:
    """Fill this host's slices by an initializer.

    Args:
        table: The table.
        initializer: As `shard` takes it.
    """
    rest = _without(table.shape, table.info.axis)
    table.restore_slices(
        lambda start, stop: np.moveaxis(np.asarray(initializer(start, (stop - start, *rest))), 0, table.info.axis)
    )


def _variable(lay: tuple[int, ...], dtype: Any, trainable: bool, name: str) -> Any:
    return tf.Variable(lambda: tf.zeros(lay, dtype), trainable=trainable, name=name)


def _unfilled(shape: Sequence[int] | None, dtype: Any) -> Source:
    if shape is None:
        raise WrongUse("An initializer needs the whole shape", "Give shape=(rows, ...).", shape=shape)
    return Source(tuple(int(size) for size in shape), numeric(dtype or "float32"), lambda: iter(()))


def _axis(axis: int, shape: tuple[int, ...]) -> int:
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        raise WrongUse("The axis must be one of the tensor's", "Axes count from 0.", axis=axis, shape=shape)
    return axis % len(shape)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
