"""Describe the replicas of a strategy: their number, this host's replicas, and their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError


@dataclass(frozen=True)
class Replicas:
    """Describe where the replicas of a strategy run.

    Attributes:
        total: Number of replicas on all hosts.
        first: The number of this host's first replica, counted over all hosts.
        devices: The full device name of each replica on this host.
        host: The number of this host.
        num_hosts: Number of hosts.

    Example:
        >>> replicas = gd.replicas_of(tf.distribute.get_strategy())
        >>> replicas.total, list(replicas.local)
        (1, [0])
    """

    total: int
    first: int
    devices: tuple[str, ...]
    host: int
    num_hosts: int

    @property
    def local(self) -> range:
        """Return the numbers of this host's replicas, counted over all hosts."""
        return range(self.first, self.first + len(self.devices))


def replicas_of(strategy: tf.distribute.Strategy) -> Replicas:
    """Return where the replicas of a strategy run. Each host has the same number of replicas.

    Args:
        strategy: A `tf.distribute.Strategy`, but no `ParameterServerStrategy`. TensorFlow's default strategy has one replica.

    Returns:
        The replicas, with the devices of this host.

    Raises:
        UsageError: If `strategy` is not a `tf.distribute.Strategy`.

    Example:
        >>> gd.replicas_of(tf.distribute.get_strategy()).num_hosts
        1
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UsageError(
            "strategy must be a tf.distribute.Strategy",
            "Use gd.make_strategy(), or tf.distribute.get_strategy() inside a scope.",
            strategy=strategy,
        )
    total = int(strategy.num_replicas_in_sync)
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        gpus = tf.config.list_logical_devices("GPU")
        return Replicas(1, 0, ((gpus or tf.config.list_logical_devices("CPU"))[0].name,), 0, 1)
    devices = tuple(strategy.extended.worker_devices)
    host = _host(strategy)
    return Replicas(total, host * len(devices), devices, host, max(1, total // len(devices)))


def _host(strategy: tf.distribute.Strategy) -> int:
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec().jobs or resolver.task_type is None:
        return 0
    chief = 1 if "chief" in resolver.cluster_spec().jobs else 0
    return int(resolver.task_id or 0) + (chief if resolver.task_type != "chief" else 0)


def per_replica(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """Build a `PerReplica` value from one value for each replica of this host, as an argument for `Strategy.run`.

    Args:
        strategy: The strategy that receives the values.
        values: One nested structure of tensors for each replica of this host, in the order of the replicas.

    Returns:
        The same structure with a `PerReplica` in place of each tensor. With one replica these are the tensors themselves.

    Raises:
        UsageError: If the number of values differs from the number of replicas.

    Example:
        >>> gd.per_replica(tf.distribute.get_strategy(), [tf.constant([1.0, 2.0])]).shape
        TensorShape([2])
    """
    replicas = replicas_of(strategy)
    if len(values) != len(replicas.devices):
        raise UsageError(
            "values must hold one value for each replica of this host",
            values=len(values),
            replicas=len(replicas.devices),
        )
    flat = [tf.nest.flatten(value) for value in values]
    first = replicas.first

    def pick(position: int) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: flat[context.replica_id_in_sync_group - first][position]
        )

    if len(values) == 1:
        return values[0]
    return tf.nest.pack_sequence_as(values[0], [pick(i) for i in range(len(flat[0]))])
