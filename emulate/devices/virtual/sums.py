"""Sum the values of virtual replicas by arithmetic, in the order in which the ring sums those of real ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from emulate.devices import upstream


def in_ring_order() -> Any:
    """Return what a strategy of virtual replicas reduces with."""
    return _operation()()


@functools.cache
def _operation() -> Any:
    """Return the class, made once TensorFlow is imported."""
    ops, values = upstream.cross_device_ops(), upstream.distributed_values()

    base: Any = ops.CrossDeviceOps

    class InRingOrder(base):
        """Reduce the values of all replicas in one process."""

        def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
            total = _total(per_replica_value.values, is_mean=reduce_op.name == "MEAN")
            return values.Mirrored([total] * len(ops.get_devices_from(destinations)))

        def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
            return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

        def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: Any, options: Any) -> Any:
            import tensorflow as tf

            gathered = tf.concat(per_replica_value.values, axis)
            return values.Mirrored([gathered] * len(ops.get_devices_from(destinations)))

    return InRingOrder


def _total(parts: Sequence[Any], *, is_mean: bool) -> Any:
    import tensorflow as tf

    number = len(parts) if is_mean else 1
    if isinstance(parts[0], tf.IndexedSlices):  # side by side, as the ring gathers them
        gathered = tf.concat([part.values for part in parts], 0)
        indices = tf.concat([part.indices for part in parts], 0)
        return tf.IndexedSlices(gathered / number if is_mean else gathered, indices, parts[0].dense_shape)
    total = sum_in_ring_order([tf.convert_to_tensor(part) for part in parts])
    return total / number if is_mean else total


def sum_in_ring_order(parts: Sequence[Any]) -> Any:
    """Add values as `emulate.devices.ordered_sum` has collectives add them: floats element by element, the smallest first.

    Args:
        parts: A tensor of each replica, of one shape and dtype.

    Returns:
        Their sum, with the bits that real replicas get by `--all-reduce ring`.
    """
    import tensorflow as tf

    if len(parts) > 2 and parts[0].dtype.is_floating:
        # One sort: the network of `ordered_sum` would have 24,063 comparisons for 1,024 replicas.
        columns = tf.sort(tf.stack([tf.reshape(part, [-1]) for part in parts], axis=1), axis=1)
        total = functools.reduce(tf.add, tf.unstack(columns, num=len(parts), axis=1))
        return tf.ensure_shape(tf.reshape(total, tf.shape(parts[0])), parts[0].shape)
    return functools.reduce(tf.add, parts)
