"""Define a Keras embedding with a sharded table. Its class is made on first use, because it imports Keras."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.static.sharded import ShardedTable, allocate, initialize
from gpudist_core.static.sources import Initializer, Source, check_initializer, uniform
from gpudist_core.values import is_whole

# What keras.layers.Embedding calls them.
OWN_NAMES = {"input_dim": "rows", "output_dim": "dim", "embeddings_initializer": "initializer"}


class ShardedEmbedding:
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
        **unknown: Other arguments of `keras.layers.Embedding`. They are refused.

    Raises:
        UsageError: For an unsupported argument or a value that is not valid.

    Example:
        >>> layer = ShardedEmbedding(10, 4, tf.distribute.get_strategy())
        >>> layer(np.array([[1, 2, 3]])).shape
        TensorShape([1, 3, 4])
    """

    def __new__(
        cls,
        rows: int = 0,
        dim: int = 0,
        strategy: tf.distribute.Strategy | None = None,
        *,
        initializer: Initializer | None = None,
        seed: int = 0,
        name: str | None = None,
        **unknown: Any,
    ) -> Any:
        _check_known(unknown)
        return _layer_class()(rows, dim, strategy, initializer=initializer, seed=seed, name=name)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return a layer from a `get_config` result, for the strategy of the current scope. Keras calls it to load models.

        Args:
            config: The configuration.

        Returns:
            The layer.
        """
        return _layer_class().from_config(config)


def _check_known(unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        own = OWN_NAMES.get(name)
        raise UsageError(
            "ShardedEmbedding accepts rows, dim, strategy, initializer, seed and name only",
            f"Use {own}." if own else "Leave it out: regularizers, constraints and masks need a table in one piece.",
            **{name: value},
        )


@functools.cache
def _layer_class() -> Any:
    import keras

    class ShardedEmbedding(keras.layers.Layer):
        """Look up rows of a sharded table. See `gpudist_core.ShardedEmbedding`."""

        def __init__(
            self,
            rows: int,
            dim: int,
            strategy: tf.distribute.Strategy | None = None,
            *,
            initializer: Any = None,
            seed: int = 0,
            **kwargs: Any,
        ) -> None:
            super().__init__(**kwargs)
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

    return ShardedEmbedding
