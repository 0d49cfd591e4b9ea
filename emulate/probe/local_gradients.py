"""Read the local gradients of another run's replicas, step after step, while this run runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from emulate import graph_functions
from emulate.probe.trace import Array, Step, Trace


class LocalGradients:
    """Read another run's local gradients.

    Args:
        trace: The other run's trace.
    """

    def __init__(self, trace: Path) -> None:
        self._trace = Trace(trace)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def in_step(
        self,
        optimizer: str,
        tensor: str,
        otherwise: Any,
        join: Callable[[list[Array]], Array],
        of_sum: Callable[[Array, int], Array] | None = None,
    ) -> Any:
        """Return a tensor's value in this step. Steps are counted here: each tensor is read once in each.

        Args:
            optimizer: The optimizer's name.
            tensor: The variable's name.
            otherwise: A tensor or array of the variable's shape: what is given where the other run's are not kept whole.
            join: Makes one array of the replicas'.
            of_sum: Makes it of their sum and number, where that alone is kept whole.

        Returns:
            What they made, of the dtype of `otherwise`.
        """
        import tensorflow as tf

        def read(own: Array) -> Array:
            steps = self._next(optimizer, tensor)
            locals_ = [step.gradients[tensor] for step in steps if tensor in step.gradients]
            if locals_ and all(array.is_complete and array.shape == own.shape for array in locals_):
                return join([array.read() for array in locals_]).astype(own.dtype)
            sums = [step.sums[tensor].read() for step in steps if tensor in step.sums]
            if of_sum is None or len(sums) < len({step.host for step in steps}) or not sums:
                return own
            return of_sum(np.sum(sums, axis=0), len(locals_)).astype(own.dtype)

        if isinstance(otherwise, np.ndarray):
            return read(otherwise)
        with graph_functions.on_cpu():
            value = tf.numpy_function(read, [otherwise], otherwise.dtype)
        value.set_shape(otherwise.shape)
        return value

    def _next(self, optimizer: str, tensor: str) -> list[Step]:
        with self._lock:
            number = self._calls[(optimizer, tensor)]
            self._calls[(optimizer, tensor)] += 1
        steps = self._trace.steps(optimizer)
        return [step for _, step in sorted(steps[number].items())] if number < len(steps) else []
