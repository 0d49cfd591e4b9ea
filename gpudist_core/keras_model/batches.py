"""A global batch, cut into one part for each replica of this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.placing import placed
from gpudist_core.pipelines.shares import cuts
from gpudist_core.replicas import Replicas, per_replica, replicas_of


@dataclass(frozen=True)
class Placed:
    """A batch that is on the replicas. Where each host has one replica it is of plain tensors, which cannot say so.

    Attributes:
        value: The batch, as `Strategy.run` takes it.
    """

    value: Any


def distributed(strategy: Any, batch: Any) -> Any:
    """A batch as `Strategy.run` takes it.

    Args:
        strategy: The strategy.
        batch: A global batch, the same on all hosts: arrays, tensors with the rows along their first axes, None; or one that
            is distributed already (`Placed`, or of `PerReplica`).

    Returns:
        The structure with a `PerReplica` in the place of each tensor; tensors where there is one replica.

    Raises:
        WrongUse: Where its parts have different numbers of rows.
    """
    import tensorflow as tf

    if isinstance(batch, Placed):
        return batch.value
    batch = tf.nest.map_structure(_value, batch)
    leaves = tf.nest.flatten(batch)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return batch
    replicas = replicas_of(strategy)
    if replicas.total == 1:
        return tf.nest.map_structure(lambda v: tf.convert_to_tensor(v) if isinstance(v, np.ndarray) else v, batch)
    return _cut(strategy, replicas, batch, [leaf for leaf in leaves if leaf is not None])


def _cut(strategy: Any, replicas: Replicas, batch: Any, leaves: list[Any]) -> Any:
    import tensorflow as tf

    rows = {_rows(leaf) for leaf in leaves}
    if len(rows) != 1:
        raise WrongUse("All parts of a batch must have equally many rows", "Mend the data.", rows=sorted(rows))
    places = cuts(rows.pop(), replicas.total, replicas.local)
    parts = placed(leaves, places, replicas.devices)

    def packed(part: list[Any]) -> Any:
        values = iter(part)
        return tf.nest.map_structure(lambda v: None if v is None else next(values), batch)

    return _without_none(strategy, [packed(part) for part in parts])


def _without_none(strategy: Any, values: list[Any]) -> Any:
    """As `per_replica`, where some components are None on all."""
    import tensorflow as tf

    if len(values) == 1:
        return values[0]
    flat = [[v for v in tf.nest.flatten(value) if v is not None] for value in values]
    made = iter(per_replica(strategy, flat))
    return tf.nest.map_structure(lambda v: None if v is None else next(made), values[0])


def _value(leaf: Any) -> Any:
    """A leaf of a batch: Keras's generators have an empty Optional in the place of None."""
    import tensorflow as tf

    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.distribute.DistributedValues, np.ndarray)):
        return leaf
    return np.asarray(leaf)


def leaves_of(batch: Any) -> list[Any]:
    """The dense tensors of a batch that is not distributed, those of ragged and sparse ones included."""
    import tensorflow as tf

    values = tf.nest.map_structure(_value, batch)
    return [leaf for leaf in tf.nest.flatten(values, expand_composites=True) if leaf is not None]


def _rows(leaf: Any) -> int:
    if len(leaf.shape) == 0:
        raise WrongUse("All parts of a batch must have rows along their first axis", "Mend the data.", shape=())
    return int(leaf.shape[0])


def row_counts(strategy: Any, batch: Any) -> tuple[int, ...] | None:
    """Rows of each replica, where this host has all of them.

    Args:
        strategy: The strategy.
        batch: A distributed batch.

    Returns:
        One count for each replica; None on several hosts.
    """
    import tensorflow as tf

    for leaf in tf.nest.flatten(batch):
        if leaf is None:
            continue
        parts = strategy.experimental_local_results(leaf)
        if len(parts) == strategy.num_replicas_in_sync and all(
            isinstance(part, tf.Tensor) and part.shape.rank for part in parts
        ):
            return tuple(int(part.shape[0]) for part in parts)
        return None
    return None


def spec_of(strategy: Any, batch: Any) -> Any:
    """Shapes and dtypes of a distributed batch, with one row where this host's first replica has none.

    Args:
        strategy: The strategy.
        batch: The batch.

    Returns:
        The structure with a `tf.TensorSpec` in the place of each tensor.
    """
    import tensorflow as tf

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        part = strategy.experimental_local_results(leaf)[0]
        return tf.TensorSpec([part.shape[0] or 1, *part.shape[1:]], part.dtype)

    return tf.nest.map_structure(spec, batch)
