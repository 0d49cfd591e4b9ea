"""Cut a global batch into one part for each replica of this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.shares import cuts, placed
from gpudist_core.replicas import Replicas, per_replica, replicas_of


@dataclass(frozen=True)
class Placed:
    """Mark a batch that is already on the replicas. With one replica per host it consists of plain tensors.

    Attributes:
        value: The batch, as an argument for `Strategy.run`.
    """

    value: Any


def distributed(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Return a batch as an argument for `Strategy.run`.

    Args:
        strategy: The strategy.
        batch: A global batch, equal on all hosts: arrays, tensors with the examples along their first axes, None; or a
            distributed batch (`Placed`, or of `PerReplica`).

    Returns:
        The structure with a `PerReplica` in place of each tensor. With one replica these are tensors.

    Raises:
        UsageError: If its parts have different numbers of examples.
    """
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


def _cut(strategy: tf.distribute.Strategy, replicas: Replicas, batch: Any, leaves: list[Any]) -> Any:
    rows = {_rows(leaf) for leaf in leaves}
    if len(rows) != 1:
        raise UsageError("All parts of a batch must have the same number of examples", "Fix the data.", rows=sorted(rows))
    places = cuts(rows.pop(), replicas.total, replicas.local)
    parts = placed(leaves, places, replicas.devices)

    def packed(part: list[Any]) -> Any:
        values = iter(part)
        return tf.nest.map_structure(lambda v: None if v is None else next(values), batch)

    return _without_none(strategy, [packed(part) for part in parts])


def _without_none(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Call `per_replica` for values in which some components are None on all replicas."""
    if len(values) == 1:
        return values[0]
    flat = [[v for v in tf.nest.flatten(value) if v is not None] for value in values]
    leaves = iter(per_replica(strategy, flat))
    return tf.nest.map_structure(lambda v: None if v is None else next(leaves), values[0])


def _value(leaf: Any) -> Any:
    """Return a leaf of a batch. Keras's generators use an empty Optional in place of None."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.distribute.DistributedValues, np.ndarray)):
        return leaf
    return np.asarray(leaf)


def leaves_of(batch: Any) -> list[Any]:
    """Return the dense tensors of a batch that is not distributed, including those inside ragged and sparse tensors."""
    values = tf.nest.map_structure(_value, batch)
    return [leaf for leaf in tf.nest.flatten(values, expand_composites=True) if leaf is not None]


def _rows(leaf: Any) -> int:
    if len(leaf.shape) == 0:
        raise UsageError("All parts of a batch must have examples along their first axis", "Fix the data.", shape=())
    return int(leaf.shape[0])


def row_counts(strategy: tf.distribute.Strategy, batch: Any) -> tuple[int, ...] | None:
    """Return the number of examples of each replica, if this host has all replicas.

    Args:
        strategy: The strategy.
        batch: A distributed batch.

    Returns:
        One number for each replica; None on several hosts.
    """
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


def spec_of(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Return shapes and dtypes of a distributed batch, with one example if this host's first replica has none.

    Args:
        strategy: The strategy.
        batch: The batch.

    Returns:
        The structure with a `tf.TensorSpec` in place of each tensor.
    """

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        part = strategy.experimental_local_results(leaf)[0]
        return tf.TensorSpec([part.shape[0] or 1, *part.shape[1:]], part.dtype)

    return tf.nest.map_structure(spec, batch)
