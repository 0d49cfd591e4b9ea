"""Make the ring's sum independent of which replica holds which value, so that topologies of equal size agree bit by bit.

A ring adds in the order of the replicas. Two hosts with two devices take the shares of a batch in another order than one host
with four (TensorFlow deals shares out host by host), so the same numbers are added in another order. Here the values are
gathered along the ring, sorted element by element and then added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from emulate.devices import upstream


def sum_in_one_order() -> None:
    """Change how collectives add dense floating-point tensors; call once in a process."""
    cls = upstream.replica_launcher_class()
    real = cls.all_reduce

    @functools.wraps(real)
    def all_reduce(self: Any, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        # Two addends need no order: a + b and b + a are the same.
        if self._group_size <= 2 or not input_tensor.dtype.is_floating:
            return real(self, input_tensor, control_input, options)
        return _gather_and_add(self, input_tensor, control_input, options)

    cls.all_reduce = all_reduce


def _gather_and_add(launcher: Any, tensor: Any, control_input: Any, options: Any) -> Any:
    import tensorflow as tf

    # Nothing gathers 16 bits of bfloat16; float32 has all of its numbers, and the values are added as what they are.
    wide = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
    with tf.device(launcher._device), tf.control_dependencies([] if control_input is None else [control_input]):
        row = tf.cast(tf.reshape(tensor, [1, -1]), wide)
    gathered = launcher._all_gather(row, options)
    with tf.device(launcher._device):
        rows = _sorted(tf.unstack(tf.cast(tf.reshape(gathered, [launcher._group_size, -1]), tensor.dtype)))
        total = functools.reduce(tf.add, rows)
        return tf.ensure_shape(tf.reshape(total, tf.shape(tensor)), tensor.shape)


def _sorted(rows: Sequence[Any]) -> list[Any]:
    """Sort element by element over the rows, by Batcher's network: few wide operations instead of many small sorts."""
    import tensorflow as tf

    result = list(rows)
    for low, high in _network(len(result)):
        result[low], result[high] = tf.minimum(result[low], result[high]), tf.maximum(result[low], result[high])
    return result


def _network(number: int) -> list[tuple[int, int]]:
    """Return the comparisons of Batcher's odd-even merge sort for any number of values."""
    comparisons = []
    outer = 1
    while outer < number:
        inner = outer
        while inner >= 1:
            for start in range(inner % outer, number - inner, 2 * inner):
                for i in range(min(inner, number - start - inner)):
                    low, high = start + i, start + i + inner
                    if low // (2 * outer) == high // (2 * outer):
                        comparisons.append((low, high))
            inner //= 2
        outer *= 2
    return comparisons
