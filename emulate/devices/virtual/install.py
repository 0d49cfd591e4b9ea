"""Change TensorFlow so that the replicas of a strategy take turns in this process; call once."""

from __future__ import annotations

import functools
from typing import Any

from emulate.devices import upstream
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.virtual.hosts import deal_from_one_iterator, stand_for_hosts
from emulate.devices.virtual.replicas import VirtualReplicas


def install_virtual(plan: DevicePlan, note: Note) -> None:
    """Trace a function given to `Strategy.run` once for all replicas, and deal their batches from one iterator.

    Args:
        plan: The hosts and devices that the process stands for.
        note: Told what the report should mention.
    """
    run = upstream.mirrored_run()
    real = run._call_for_each_replica

    @functools.wraps(real)
    def call_for_each_replica(distribution: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        import tensorflow as tf

        if tf.executing_eagerly() or len(distribution.extended.worker_devices) == 1:
            return real(distribution, fn, args, kwargs)
        return VirtualReplicas(distribution).run(fn, args, kwargs)

    run._call_for_each_replica = call_for_each_replica
    _number_replicas()
    deal_from_one_iterator()
    stand_for_hosts(plan.num_hosts, plan.num_devices, note)


def _number_replicas() -> None:
    """Let the replica that is traced for all take its values from the first of them."""
    for cls in (upstream.mirrored_extended(), upstream.collective_extended()):
        real = cls._get_local_replica_id

        @functools.wraps(real)
        def local(self: Any, number: Any, _real: Any = real) -> Any:
            import tensorflow as tf

            return 0 if tf.is_tensor(number) else _real(self, number)

        cls._get_local_replica_id = local
