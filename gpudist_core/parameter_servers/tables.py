"""Tables whose rows are divided among parameter servers: only the rows looked up, and their gradients, travel."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.shares import shares
from gpudist_core.static import operations
from gpudist_core.static.initializers import Initializer, check_initializer, uniform
from gpudist_core.upstream import coordination

_PIECE_BYTES = 1 << 26


class PartitionedTable(tf.Module):
    """A table in parts, each a variable on the next server; `partition` makes it.

    Args:
        parts: The variables, in the order of their rows; the first `rows % len(parts)` have a row more than the others.
        name: Its name.
    """

    def __init__(self, parts: Sequence[Any], name: str | None = None) -> None:
        super().__init__(name)
        self.parts = list(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole table."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def lookup(self, ids: Any) -> Any:
        """Rows of the table; its gradient is sparse.

        Args:
            ids: Numbers of rows, integers of any shape.

        Returns:
            A tensor of shape (*ids.shape, *shape[1:]).
        """
        return lookup(self.parts, ids)

    def as_numpy(self) -> npt.NDArray[Any]:
        """The whole table, in this process's memory."""
        return np.concatenate([part.numpy() for part in self.parts])

    def assign(self, values: Any) -> None:
        """Set the whole table, piece by piece.

        Args:
            values: An array or tensor of the table's shape, a memory map perhaps.

        Raises:
            WrongUse: Where the shape is another.
        """
        if tuple(values.shape) != self.shape:
            raise WrongUse(
                "A table is assigned values of its shape", "Make another table for them.", shape=values.shape, table=self.shape
            )
        fill(self.parts, lambda start, shape: values[start : start + shape[0]])


def partition(
    values: Any,
    strategy: Any,
    *,
    parts: int | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    trainable: bool = True,
    name: str | None = None,
) -> PartitionedTable:
    """Divide a table's rows among the servers of a strategy.

    Train it by a model that is a `tf.Module` with the table as an attribute, or pass `variables=[*model.trainable_variables,
    *table.parts]`.

    Args:
        values: An array or a tensor of shape (rows, ...); or a function (start, (count, ...)) -> values of those rows, as
            `gpudist_core.static.uniform` makes one, so that no process ever holds the whole table.
        strategy: A `ParameterServerStrategy`.
        parts: In how many; one for each server unless given. Give it where a checkpoint is to be restored with another number.
        shape: Of the whole table, where the values are a function.
        dtype: The values' own unless given; float32 for a function.
        trainable: Whether gradient tapes watch it.
        name: Its name.

    Returns:
        The table.

    Raises:
        WrongUse: Where the strategy has no servers, the shape is not known or there are more parts than rows.

    Example:
        >>> table = partition(np.eye(5, dtype="float32"), tf.distribute.get_strategy(), parts=2)
        >>> table.lookup([[4, 0]]).shape, [part.shape[0] for part in table.parts]
        (TensorShape([1, 2, 5]), [3, 2])
    """
    if callable(values) != (shape is not None):
        raise WrongUse(
            "A shape is given where the values are a function, and only there", "Give both or an array.", shape=shape
        )
    if not callable(values) and not hasattr(values, "shape"):
        values = np.asarray(values)
    whole = tuple(shape if shape is not None else values.shape)
    if not whole:
        raise WrongUse("A table has its rows along its first axis", "Give an array of rows.", shape=whole)
    kind = tf.as_dtype(dtype if dtype is not None else "float32" if callable(values) else values.dtype)
    sizes = part_sizes(whole[0], parts, strategy)
    with strategy.scope():
        made = [_variable((size, *whole[1:]), kind, trainable, f"{name or 'table'}_{i}") for i, size in enumerate(sizes)]
    table = PartitionedTable(made, name)
    fill(made, values if callable(values) else lambda start, shape: values[start : start + shape[0]])
    return table


def lookup(parts: Sequence[Any], ids: Any) -> Any:
    """Rows of a table in parts; each server sends only those of its own."""
    rows = sum(part.shape[0] for part in parts)
    return tf.nn.embedding_lookup(list(parts), operations.known(tf.cast(operations.dense(ids), tf.int64), rows))


def part_sizes(rows: int, parts: int | None, strategy: Any) -> list[int]:
    """Rows of each part.

    Args:
        rows: Of the table.
        parts: How many parts; None for one on each server.
        strategy: Whose servers.

    Returns:
        As many numbers, all positive.

    Raises:
        WrongUse: Where that cannot be.
    """
    if parts is None and not coordination.is_coordinated(strategy):
        raise WrongUse(
            "A table is divided among the servers of a ParameterServerStrategy",
            "Say parts=..., or use gd.shard or gd.ShardedEmbedding, which divide it among devices.",
            strategy=type(strategy).__name__,
        )
    count = parts if parts is not None else min(rows, coordination.num_tasks(strategy)[1])
    if not 1 <= count <= rows:
        raise WrongUse("A table has at least one row in each part", "Use fewer parts, at least one.", rows=rows, parts=parts)
    return shares(rows, count)


def fill(parts: Sequence[Any], values: Initializer) -> None:
    """Set the rows of a table, in pieces of at most 64 MB.

    Args:
        parts: Its variables.
        values: A function (start, (count, ...)) -> values of those rows of the whole table.
    """
    first = 0
    for part in parts:
        for start, stop in _pieces(part):
            piece = tf.cast(tf.convert_to_tensor(values(first + start, (stop - start, *part.shape[1:]))), part.dtype)
            part.scatter_update(tf.IndexedSlices(piece, tf.range(start, stop)))
        first += part.shape[0]


def _pieces(part: Any) -> Iterator[tuple[int, int]]:
    rows, *rest = part.shape
    each = max(1, _PIECE_BYTES // max(1, int(np.prod(rest)) * part.dtype.size))
    return ((start, min(start + each, rows)) for start in range(0, rows, each))


def _variable(shape: tuple[int, ...], dtype: Any, trainable: bool, name: str) -> Any:
    # A function: its zeros are made on the server.
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=trainable, name=name, shape=shape, dtype=dtype)


class PartitionedEmbedding:
    """A `keras.layers.Layer` that turns ids into rows of a trained table, of which each parameter server holds one part.

    Each part is a Keras weight of its own, so optimizers keep its slots beside it on its server. Its first values depend on the
    seed alone; saved weights hold the whole table and load into any number of parts.

    Args:
        rows: Rows of the table: ids are 0 to rows - 1.
        dim: Columns of the table.
        parts: In how many parts; one for each server of the strategy whose scope it is made in, unless given.
        initializer: A function (start, (count, dim)) -> values of those rows; uniform between -0.05 and 0.05 unless given.
        seed: Of the default initializer.
        name: The layer's name.

    Raises:
        WrongUse: Where parts are not given and the strategy has no servers, or there are more parts than rows.

    Example:
        >>> layer = PartitionedEmbedding(10, 4, parts=3)
        >>> layer(np.array([[1, 2, 9]])).shape, [weight.shape[0] for weight in layer.weights]
        (TensorShape([1, 3, 4]), [4, 3, 3])
    """

    def __new__(
        cls,
        rows: int,
        dim: int,
        *,
        parts: int | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        name: str | None = None,
    ) -> Any:
        return _layer_class()(rows, dim, parts=parts, initializer=initializer, seed=seed, name=name)


@functools.cache
def _layer_class() -> Any:
    import keras

    class PartitionedEmbedding(keras.layers.Layer):
        """See `gpudist_core.PartitionedEmbedding`."""

        def __init__(
            self, rows: int, dim: int, *, parts: int | None = None, initializer: Any = None, seed: int = 0, **kwargs: Any
        ) -> None:
            super().__init__(**kwargs)
            if initializer is not None:
                check_initializer(initializer)
            sizes = part_sizes(rows, parts, tf.distribute.get_strategy())
            self.rows, self.dim, self.num_parts, self.seed = rows, dim, len(sizes), seed
            # Without autocast: under a mixed-precision policy each step would cast all parts.
            self._parts = [
                self.add_weight(shape=(size, dim), initializer="zeros", name=f"part_{i}", autocast=False)
                for i, size in enumerate(sizes)
            ]
            fill(self._variables, initializer or uniform(seed=seed))
            self.built = True

        @property
        def _variables(self) -> list[Any]:
            return [part.value for part in self._parts]

        def call(self, ids: Any) -> Any:
            return tf.cast(lookup(self._variables, ids), self.compute_dtype)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return (*input_shape, self.dim)

        def save_own_variables(self, store: Any) -> None:
            store["table"] = np.concatenate([part.numpy() for part in self._variables])

        def load_own_variables(self, store: Any) -> None:
            table = np.asarray(store["table"])
            fill(self._variables, lambda start, shape: table[start : start + shape[0]])

        def get_config(self) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config()
            return config | {"rows": self.rows, "dim": self.dim, "parts": self.num_parts, "seed": self.seed}

    return PartitionedEmbedding
