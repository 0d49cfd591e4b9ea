"""Divide the rows of tables among parameter servers: only the rows of a lookup and their gradients are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.plan import shares
from gpudist_core.static import operations
from gpudist_core.static.sources import Initializer, check_initializer, uniform
from gpudist_core.upstream import strategies

_PIECE_BYTES = 1 << 26


class PartitionedTable(tf.Module):
    """Hold a table in parts, each a variable on the next server. Make it with `partition`.

    Args:
        parts: The variables, in the order of their rows. The first `rows % len(parts)` parts have one row more than the others.
        name: Its name.
    """

    def __init__(self, parts: Sequence[tf.Variable], name: str | None = None) -> None:
        super().__init__(name)
        self.parts = list(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole table."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def lookup(self, ids: npt.ArrayLike) -> tf.Tensor:
        """Look up rows of the table. The gradient is sparse.

        Args:
            ids: Row numbers, integers of any shape.

        Returns:
            The rows as a tensor. Its shape is that of `ids`, followed by the shape of a row.
        """
        return lookup(self.parts, ids)

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return the whole table, in this process's memory."""
        return np.concatenate([part.numpy() for part in self.parts])

    def assign(self, values: Any) -> None:
        """Set the whole table, piece by piece.

        Args:
            values: An array, a memory map or a tensor of the table's shape.

        Raises:
            UsageError: If the shape differs.
        """
        if tuple(values.shape) != self.shape:
            raise UsageError(
                "values must have the shape of the table",
                "Make another table for values of another shape.",
                shape=values.shape,
                table=self.shape,
            )
        fill(self.parts, lambda start, shape: values[start : start + shape[0]])


def partition(
    values: Any,
    strategy: tf.distribute.Strategy,
    *,
    parts: int | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    trainable: bool = True,
    name: str | None = None,
) -> PartitionedTable:
    """Divide a table's rows among the servers of a strategy.

    To train it, use a model that is a `tf.Module` with the table as an attribute, or pass
    `variables=[*model.trainable_variables, *table.parts]`.

    Args:
        values: An array or a tensor of shape (rows, ...). Or a function (start, (count, ...)) -> values of those rows, such as
            `gpudist_core.static.uniform` returns, so that no process ever holds the whole table.
        strategy: A `ParameterServerStrategy`.
        parts: Number of parts. Default: one for each server. Set it if you want to restore a checkpoint with another number of
            servers.
        shape: The shape of the whole table, if `values` is a function.
        dtype: The dtype. Default: the dtype of the values; float32 for a function.
        trainable: Whether gradient tapes watch it.
        name: Its name.

    Returns:
        The table.

    Raises:
        UsageError: If the strategy has no servers, the shape is unknown, or there are more parts than rows.

    Example:
        >>> table = partition(np.eye(5, dtype="float32"), tf.distribute.get_strategy(), parts=2)
        >>> table.lookup([[4, 0]]).shape, [part.shape[0] for part in table.parts]
        (TensorShape([1, 2, 5]), [3, 2])
    """
    if callable(values) != (shape is not None):
        raise UsageError(
            "shape must be given if and only if values is a function", "Pass both, or an array without a shape.", shape=shape
        )
    if not callable(values) and not hasattr(values, "shape"):
        values = np.asarray(values)
    whole = tuple(shape if shape is not None else values.shape)
    if not whole:
        raise UsageError("A table must have its rows along its first axis", "Pass an array of shape (rows, ...).", shape=whole)
    kind = tf.as_dtype(dtype if dtype is not None else "float32" if callable(values) else values.dtype)
    sizes = part_sizes(whole[0], parts, strategy)
    with strategy.scope():
        variables = [_variable((size, *whole[1:]), kind, trainable, f"{name or 'table'}_{i}") for i, size in enumerate(sizes)]
    table = PartitionedTable(variables, name)
    fill(variables, values if callable(values) else lambda start, shape: values[start : start + shape[0]])
    return table


def lookup(parts: Sequence[Any], ids: Any) -> Any:
    """Look up rows of a table in parts. Each server sends only its own rows."""
    rows = sum(part.shape[0] for part in parts)
    return tf.nn.embedding_lookup(list(parts), operations.known(tf.cast(operations.dense(ids), tf.int64), rows))


def part_sizes(rows: int, parts: int | None, strategy: tf.distribute.Strategy) -> list[int]:
    """Return the number of rows of each part.

    Args:
        rows: Number of rows of the table.
        parts: Number of parts; None for one on each server.
        strategy: The strategy with the servers.

    Returns:
        One positive number for each part.

    Raises:
        UsageError: If there are no servers, or more parts than rows.
    """
    if parts is None and not strategies.is_coordinated(strategy):
        raise UsageError(
            "A table needs the servers of a ParameterServerStrategy",
            "Pass parts=..., or use gd.shard or gd.ShardedEmbedding, which split it over devices.",
            strategy=type(strategy).__name__,
        )
    count = parts if parts is not None else min(rows, strategies.num_tasks(strategy)[1])
    if not 1 <= count <= rows:
        raise UsageError(
            "A table must have at least one row in each part", "Use fewer parts, at least one.", rows=rows, parts=parts
        )
    return shares(rows, count)


def fill(parts: Sequence[Any], values: Initializer) -> None:
    """Set the rows of a table, in pieces of at most 64 MB.

    Args:
        parts: Its variables.
        values: A function (start, (count, ...)) -> values of those rows of the whole table.
    """
    first = 0
    for part in parts:
        rows, *rest = part.shape
        each = max(1, _PIECE_BYTES // max(1, int(np.prod(rest)) * part.dtype.size))
        for start in range(0, rows, each):
            stop = min(start + each, rows)
            piece = tf.cast(tf.convert_to_tensor(values(first + start, (stop - start, *part.shape[1:]))), part.dtype)
            part.scatter_update(tf.IndexedSlices(piece, tf.range(start, stop)))
        first += part.shape[0]


def _variable(shape: tuple[int, ...], dtype: Any, trainable: bool, name: str) -> Any:
    # A function: its zeros are made on the server.
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=trainable, name=name, shape=shape, dtype=dtype)


class PartitionedEmbedding(keras.layers.Layer):
    """Look up rows of a trained table of which each parameter server holds a part, as a `keras.layers.Layer`.

    Each part is a Keras weight, so optimizers keep its slots beside it on its server. Its initial values depend on the seed
    only. Saved weights hold the whole table and can be loaded into any number of parts.

    Args:
        rows: Rows of the table: ids are 0 to rows - 1.
        dim: Columns of the table.
        parts: Number of parts. Default: one for each server of the strategy of the current scope.
        initializer: A function (start, (count, dim)) -> values of those rows. Default: uniform between -0.05 and 0.05.
        seed: The seed of the default initializer.
        name: The layer's name.
        **others: Other arguments of `keras.layers.Layer`.

    Raises:
        UsageError: If `parts` is not given and the strategy has no servers, or there are more parts than rows.

    Example:
        >>> layer = PartitionedEmbedding(10, 4, parts=3)
        >>> layer(np.array([[1, 2, 9]])).shape, [weight.shape[0] for weight in layer.weights]
        (TensorShape([1, 3, 4]), [4, 3, 3])
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        parts: int | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(name=name, **others)
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
