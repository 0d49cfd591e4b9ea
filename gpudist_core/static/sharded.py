"""Keep one slice of a table on each device, for tables larger than a device.

The slices are the components of one mirrored variable of a slice's shape, with different values. Collectives in replica context
combine what a step needs of them. So the table works with every loop, optimizer and gradient tape that works with
tf.distribute, on one host and on several. The slots of its optimizer are sliced, too. The gradient of a lookup is
`tf.IndexedSlices` of the rows that this slice was asked for. The alternative, DTensor, has dense gradients only and does not
mix with tf.distribute in one step, and Keras 3 does not support it (`keras.distribution` does nothing on TensorFlow).

CentralStorageStrategy keeps every variable in the host's memory, once for all devices. There a table is in one piece, as a
plain variable of the strategy, and the same program runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from numpy.typing import NDArray

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.replicas import replicas_of
from gpudist_core.state import of_variable
from gpudist_core.static import context, memory, operations
from gpudist_core.static.sources import (
    PIECE_BYTES,
    Initializer,
    Source,
    check_initializer,
    exactly,
    numeric,
    source_of,
    uniform,
)
from gpudist_core.upstream import models
from gpudist_core.upstream import strategies as upstream

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
    if initializer is None:
        source = source_of(tensor, shape, dtype)
    elif shape is None:
        raise UsageError("An initializer needs the whole shape", "Give shape=(rows, ...).", shape=shape)
    else:
        source = Source(tuple(int(size) for size in shape), numeric(dtype or "float32"), lambda: iter(()))

    def create(lay: tuple[int, ...]) -> Any:
        return tf.Variable(lambda: tf.zeros(lay, source.dtype), trainable=trainable, name=name or "sharded")

    table = allocate(source, strategy, axis, create)
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
    in_one_piece = upstream.is_central(strategy)
    shape = source.shape
    info = operations.ShardInfo(operations.checked_axis(axis, shape), shape[axis], 1 if in_one_piece else replicas.total)
    if not info.rows:
        raise UsageError("A table must have at least one row to split", "Pass a table with rows.", shape=shape, axis=axis)
    lay = (*shape[: info.axis], info.height, *shape[info.axis + 1 :])
    size = int(np.prod(lay, dtype=np.int64)) * source.dtype.itemsize
    devices = strategy.extended.parameter_devices if in_one_piece else replicas.devices
    memory.check_room(dict.fromkeys(devices, size), _TOO_LARGE)
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
    rest = operations.without(table.shape, table.info.axis)
    table.restore_slices(
        lambda start, stop: np.moveaxis(np.asarray(initializer(start, (stop - start, *rest))), 0, table.info.axis)
    )


Array = NDArray[Any]


class ShardedTable:
    """Hold a table of which each replica has one slice. Make it with `shard`.

    Args:
        variable: A distributed `tf.Variable` of a slice's shape, or the Keras variable around it.
        strategy: The strategy whose replicas hold the slices.
        info: Which replica holds which rows.
        shape: The shape of the whole table.

    Attributes:
        variable: The variable that an optimizer trains: another slice on each replica. Its local gradient
            is the slice's total.
        strategy: The strategy whose replicas hold the slices.
        info: Which replica holds which rows.
        shape: The shape of the whole table.
    """

    def __init__(
        self, variable: Any, strategy: tf.distribute.Strategy, info: operations.ShardInfo, shape: tuple[int, ...]
    ) -> None:
        self.variable = variable
        self.strategy = strategy
        self.info = info
        self.shape = shape
        kept = of_variable.of(self._tf)
        kept.shard, kept.table = info, weakref.ref(self)
        self._read_piece: Any = None

    @property
    def _tf(self) -> Any:
        """Return the tf.Variable, also if a Keras variable wraps it."""
        return models.plain(self.variable)

    @property
    def dtype(self) -> tf.DType:
        """Return the table's dtype."""
        return self._tf.dtype

    @property
    def name(self) -> str:
        """Return the variable's name."""
        return str(self.variable.name).removesuffix(":0")

    @property
    def slices(self) -> tuple[tf.Variable, ...]:
        """Return this host's slices, each a `tf.Variable` on its device, in the order of the replicas."""
        return tuple(self.strategy.experimental_local_results(self._tf))

    def _slice(self, replica: int) -> Any:
        """Return a replica's own variable: a gather from the mirrored one would copy all of it (TensorFlow 2.21)."""
        return self.slices[replica - replicas_of(self.strategy).first]

    def _replica(self, what: str) -> int:
        if self.info.total_replicas == 1:
            return 0
        replica = context.replica_in(self.strategy)
        if replica is None:
            raise UsageError(
                f"{what} needs all replicas of the table's own strategy at once",
                "Call it inside strategy.run. Outside, table.as_numpy() and table.read() return the values.",
                strategy=type(self.strategy).__name__,
                replicas=self.info.total_replicas,
            )
        return replica

    @tf.autograph.experimental.do_not_convert
    def lookup(self, ids: npt.ArrayLike) -> tf.Tensor:
        """Look up rows of the table in a step. Every replica must call it, each with its own ids.

        Args:
            ids: Row numbers of any integer dtype and shape. Each replica may pass another number of ids, also none.

        Returns:
            The rows as a tensor. Its shape is that of `ids`, followed by the shape of a row. An id outside of the table raises
            `tf.errors.InvalidArgumentError` on all replicas.
        """
        return self.gather(ids)

    @tf.autograph.experimental.do_not_convert
    def gather(self, ids: npt.ArrayLike, axis: int = 0) -> tf.Tensor:
        """Gather along an axis in a step, like `tf.gather(table, ids, axis=axis)`. Every replica must call it.

        Args:
            ids: Numbers along the axis, of any integer dtype and shape. Each replica may pass another number of ids, also none.
            axis: The dimension to gather along. It may differ from the split dimension.

        Returns:
            The entries as a tensor. In the table's shape, the shape of `ids` replaces the dimension of the axis.
        """
        axis = operations.checked_axis(axis, self.shape)
        if upstream.is_symbolic():
            return self._symbol(self.shape[:axis], ids, self.shape[axis + 1 :])
        replica = self._replica("ShardedTable.gather")
        with context.meeting("ShardedTable.gather"):
            return operations.gather(self._slice(replica), self.info, self.shape[axis], ids, axis, replica)

    @tf.autograph.experimental.do_not_convert
    def matmul(self, x: tf.Tensor) -> tf.Tensor:
        """Compute `x @ table` in a step. Every replica must call it, each with its own x.

        Args:
            x: A tensor of the table's dtype and shape (..., rows of the table).

        Returns:
            A tensor of shape (..., columns of the table).

        Raises:
            UsageError: If the table is not of rank 2, or the last dimension of x is not the table's number of rows.
        """
        size = getattr(x, "shape", (None,))[-1]
        if len(self.shape) != 2 or size != self.shape[0]:
            raise UsageError("x @ table needs x of shape (..., rows)", "Fix the shapes.", x=size, table=self.shape)
        if upstream.is_symbolic():
            return self._symbol((), x[..., 0], self.shape[1:])
        replica = self._replica("ShardedTable.matmul")
        with context.meeting("ShardedTable.matmul"):
            return operations.matmul(self._slice(replica), self.info, self.shape[1], x, replica)

    def _symbol(self, before: tuple[int, ...], inner: Any, after: tuple[int, ...]) -> Any:
        """Return a tensor with the shape of the result: replicas cannot exchange values while Keras builds a model."""
        inner = tf.convert_to_tensor(inner)
        zeros = tf.zeros(tf.concat([before, tf.shape(inner), after], 0), self.dtype)
        zeros.set_shape([*before, *inner.shape, *after])
        return zeros

    def bytes_per_device(self) -> dict[str, int]:
        """Return the size in bytes of this host's slices, by the device's full name."""
        return {part.device: int(np.prod(part.shape, dtype=np.int64)) * int(part.dtype.size) for part in self.slices}

    def _local(self) -> Iterator[tuple[int, int, Any]]:
        """Yield this host's slices: (start, stop, variable)."""
        first = replicas_of(self.strategy).first
        for k, variable in enumerate(self.slices):
            yield (*self.info.span(first + k), variable)

    def assign_rows(self, start: int, values: Any) -> None:
        """Replace a part of the table along the split axis, between steps. Each host must pass the same values.

        Args:
            start: The start of the part along the axis.
            values: An array with the shape of the table, except along the axis.

        Raises:
            UsageError: If it is not a part of the table, or inside a step.
        """
        context.check_eager("ShardedTable.assign_rows")
        axis = self.info.axis
        rows = exactly(values, np.dtype(self.dtype.as_numpy_dtype))
        fits = rows.ndim == len(self.shape) and operations.without(rows.shape, axis) == operations.without(self.shape, axis)
        if not fits or not 0 <= start <= self.info.rows - rows.shape[axis]:
            raise UsageError(
                "Rows to assign must be rows of the table",
                "Fix start or values.",
                start=start,
                values=rows.shape,
                table=self.shape,
            )
        begin = [0] * rows.ndim
        begin[axis] = start
        self.place(tuple(begin), rows)

    def place(self, begin: tuple[int, ...], block: Array) -> None:
        """Write a block of the table into the overlapping slices of this host.

        Args:
            begin: The start of the block in the table, in each dimension.
            block: The values.
        """
        axis = self.info.axis
        for start, stop, variable in self._local():
            low, high = max(start, begin[axis]), min(stop, begin[axis] + block.shape[axis])
            if low < high:
                inner = memory.along(axis, low - begin[axis], high - begin[axis])
                memory.write(variable, (*begin[:axis], low - start, *begin[axis + 1 :]), block[inner])

    def state_slices(self) -> Iterator[tuple[int, Array]]:
        """Yield this host's part of the table in pieces that fit in memory: (start along the axis, values).

        Yields:
            The pieces of one slice after the other.
        """
        for start, stop, variable in self._local():
            if self.info.axis == 0:
                yield from ((start + at, rows) for at, rows in memory.read_pieces(variable, stop - start))
            elif start < stop:
                yield start, variable.numpy()[memory.along(self.info.axis, 0, stop - start)]

    def restore_slices(self, reader: Callable[[int, int], Any]) -> None:
        """Fill this host's part of the table.

        Args:
            reader: A function of (start, stop) along the axis that returns that part of the table. Calls are sequential.
        """
        each = self._rows_per_piece()
        for start, stop, _ in self._local():
            for low in range(start, stop, each):
                self.assign_rows(low, reader(low, min(stop, low + each)))

    def _rows_per_piece(self) -> int:
        size = int(np.prod(operations.without(self.shape, self.info.axis), dtype=np.int64)) * int(self.dtype.size)
        return max(1, PIECE_BYTES // max(1, size))

    def read(self, chunk: int | None = None) -> Iterator[tuple[int, Array]]:
        """Yield the whole table in order, on every host: (start along the axis, values). With several hosts, all must call it.

        Args:
            chunk: Number of rows along the axis in each piece. Default: about 4 MiB.

        Yields:
            The pieces.
        """
        context.check_eager("ShardedTable.read")
        each = chunk or self._rows_per_piece()
        if replicas_of(self.strategy).num_hosts > 1:
            if self._read_piece is None:
                self._read_piece = tf.function(
                    lambda ids: self.strategy.run(lambda: self.gather(ids, axis=self.info.axis)), reduce_retracing=True
                )
            for low in range(0, self.info.rows, each):
                ids = tf.range(low, min(self.info.rows, low + each), dtype=tf.int64)
                yield low, np.asarray(self.strategy.experimental_local_results(self._read_piece(ids))[0])
            return
        for start, stop, variable in self._local():
            for low in range(start, stop, each):
                high = min(stop, low + each)
                if self.info.axis == 0:
                    yield low, memory.read(variable, low - start, high - start)
                else:
                    yield low, variable.numpy()[memory.along(self.info.axis, low - start, high - start)]

    def as_numpy(self) -> Array:
        """Return the whole table in host memory. With several hosts, all must call it."""
        whole = np.empty(self.shape, self.dtype.as_numpy_dtype)
        for start, values in self.read():
            whole[memory.along(self.info.axis, start, start + values.shape[self.info.axis])] = values
        return whole

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "A sharded table cannot be converted to one tensor",
            "In a step, use lookup, gather or matmul. as_numpy() gathers the table on this host.",
            table=self.name,
        )

    def __repr__(self) -> str:
        return f"<ShardedTable {self.name!r} shape={self.shape} dtype={self.dtype.name} {self.info}>"


def table_of(variable: Any) -> ShardedTable | None:
    """Return the table of a Keras or TensorFlow variable that holds its slices; None for any other variable."""
    kept = of_variable.known(models.plain(variable))
    return None if kept is None or kept.table is None else kept.table()


# What keras.layers.Embedding calls them.
OWN_NAMES = {"input_dim": "rows", "output_dim": "dim", "embeddings_initializer": "initializer"}
_OF_EVERY_LAYER = ("dtype", "trainable")


class ShardedEmbedding(keras.layers.Layer):
    """Look up rows of a trained table of which each device holds one slice, as a `keras.layers.Layer`.

    The layer has one trainable weight, the slices. Its `table` is the `ShardedTable`. Call it in steps (inside `Strategy.run`);
    Keras's `fit` does that. The weight's gradient is already the slice's total. Do not sum it over replicas again: train the
    layer with `gd.TrainStep`, `gd.distributed`, or the optimizer of one of them.

    Args:
        rows: Rows of the table: ids are 0 to rows - 1.
        dim: Columns of the table.
        strategy: The strategy whose replicas hold the slices. Default: the strategy of the current scope.
        initializer: As for `gd.shard`. Default: uniform between -0.05 and 0.05.
        seed: The seed of the default initializer.
        name: The layer's name.
        **others: `dtype` and `trainable`, which Keras keeps of every layer. Those of `keras.layers.Embedding` are refused.

    Raises:
        UsageError: For an unsupported argument or a value that is not valid.

    Example:
        >>> layer = ShardedEmbedding(10, 4, tf.distribute.get_strategy())
        >>> layer(np.array([[1, 2, 3]])).shape
        TensorShape([1, 3, 4])
    """

    def __init__(
        self,
        rows: int = 0,
        dim: int = 0,
        strategy: tf.distribute.Strategy | None = None,
        *,
        initializer: Initializer | None = None,
        seed: int = 0,
        name: str | None = None,
        **others: Any,
    ) -> None:
        for what, value in others.items():
            own = OWN_NAMES.get(what)
            if what not in _OF_EVERY_LAYER:
                raise UsageError(
                    "ShardedEmbedding accepts rows, dim, strategy, initializer, seed and name only",
                    f"Use {own}." if own else "Leave it out: regularizers, constraints and masks need a table in one piece.",
                    **{what: value},
                )
        super().__init__(name=name, **others)
        for what, count in (("rows", rows), ("dim", dim)):
            if not is_whole(count, 1):
                raise UsageError(f"{what} must be a positive integer", **{what: count})
        if initializer is not None:
            check_initializer(initializer)
        self.rows, self.dim, self.seed = int(rows), int(dim), seed
        strategy = strategy if strategy is not None else tf.distribute.get_strategy()
        source = Source((rows, dim), np.dtype(self.variable_dtype), lambda: iter(()))
        table = allocate(source, strategy, 0, self._create)
        initialize(table, initializer or uniform(seed=seed))
        if table.info.total_replicas > 1:
            # Keras (3.8 to 3.15) gives `get_weights` what `numpy` of the variable returns, which would be one slice. Keras
            # asks no layer for it, and only in between steps. So the variable, which this layer has made, has its own.
            object.__setattr__(table.variable, "numpy", table.as_numpy)
        self._table = [table]  # in a list of its own kind: Keras would look for layers and weights inside of it
        self.built = True

    def _create(self, shape: tuple[int, ...]) -> Any:
        # Without autocast: under a mixed-precision policy each step would cast the whole slice.
        return self.add_weight(shape=shape, initializer="zeros", name="embeddings", autocast=False)

    @property
    def table(self) -> ShardedTable:
        table: ShardedTable = self._table[0]
        return table

    def call(self, ids: Any) -> Any:
        ids = tf.convert_to_tensor(ids)
        return tf.cast(self.table.lookup(ids if ids.dtype.is_integer else tf.cast(ids, tf.int64)), self.compute_dtype)

    def compute_output_spec(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the shape without tracing: replicas cannot exchange values while Keras builds a model."""
        return keras.KerasTensor((*ids.shape, self.dim), dtype=self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape, self.dim)

    def save_own_variables(self, store: Any) -> None:
        store["table"] = self.table.as_numpy()

    def load_own_variables(self, store: Any) -> None:
        self.table.assign_rows(0, np.asarray(store["table"]))

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return config | {"rows": self.rows, "dim": self.dim, "seed": self.seed}
