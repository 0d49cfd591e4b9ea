"""The replicas of a strategy: how many, which of them are this host's, and on which devices they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpudist_core.errors import WrongUse


@dataclass(frozen=True)
class Replicas:
    """Where a strategy's replicas are.

    Attributes:
        total: Replicas in all, over all hosts.
        first: The number of this host's first replica, counted over all hosts.
        devices: The device of each replica of this host, by its full name.
        host: The number of this host.
        num_hosts: Hosts in all.
    """

    total: int
    first: int
    devices: tuple[str, ...]
    host: int
    num_hosts: int

    @property
    def local(self) -> range:
        """The numbers of this host's replicas, counted over all hosts."""
        return range(self.first, self.first + len(self.devices))


def replicas_of(strategy: Any) -> Replicas:
    """Where a strategy's replicas are; each host has equally many.

    Args:
        strategy: A `tf.distribute.Strategy` other than `ParameterServerStrategy`; TensorFlow's default strategy is one replica.

    Returns:
        The replicas, those of this host by device.

    Raises:
        WrongUse: It is none.
    """
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.Strategy):
        raise WrongUse(
            "A tf.distribute.Strategy is needed",
            "gd.make_strategy() makes one; tf.distribute.get_strategy() is that of the scope.",
            strategy=strategy,
        )
    total = int(strategy.num_replicas_in_sync)
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        gpus = tf.config.list_logical_devices("GPU")
        return Replicas(1, 0, ((gpus or tf.config.list_logical_devices("CPU"))[0].name,), 0, 1)
    devices = tuple(strategy.extended.worker_devices)
    host = _host(strategy)
    return Replicas(total, host * len(devices), devices, host, max(1, total // len(devices)))


def _host(strategy: Any) -> int:
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.cluster_spec().jobs or resolver.task_type is None:
        return 0
    chief = 1 if "chief" in resolver.cluster_spec().jobs else 0
    return int(resolver.task_id or 0) + (chief if resolver.task_type != "chief" else 0)


def per_replica(strategy: Any, values: Sequence[Any]) -> Any:
    """One value for each replica of this host, as `Strategy.run` takes it.

    Args:
        strategy: The strategy that will run on them.
        values: One structure of tensors for each replica of this host, in order.

    Returns:
        The structure with a `PerReplica` for each tensor; the tensors themselves where there is one replica.

    Raises:
        WrongUse: There are more or fewer values than replicas.
    """
    import tensorflow as tf

    replicas = replicas_of(strategy)
    if len(values) != len(replicas.devices):
        raise WrongUse(
            "There is one value for each replica of this host",
            "Give as many.",
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
