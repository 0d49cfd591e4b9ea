"""Read the local gradients of another run's replicas, step after step, while this run runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulate import graph_functions
from emulate.probe.trace import Array, Trace


class LocalGradients:
    """Read another run's local gradients.

    Args:
        trace: The other run's trace.
    """

    def __init__(self, trace: Path) -> None:
        self._trace = Trace(trace)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def in_step(self, optimizer: str, tensor: str, otherwise: Any, join: Callable[[list[Array]], Array]) -> Any:
        """Return a tensor's value in this step. Steps are counted here: each tensor is read once in each.

        Args:
            optimizer: The optimizer's name.
            tensor: The variable's name.
            otherwise: A tensor of the variable's shape: what is given where the other run's are not kept whole.
            join: Makes one array of the replicas'.

        Returns:
            What `join` made, of the dtype of `otherwise`.
        """
        import tensorflow as tf

        def read(own: Array) -> Array:
            found = self._next(optimizer, tensor, own.shape)
            return join(found).astype(own.dtype) if found else own

        with graph_functions.on_cpu():
            value = tf.numpy_function(read, [otherwise], otherwise.dtype)
        value.set_shape(otherwise.shape)
        return value

    def _next(self, optimizer: str, tensor: str, shape: tuple[int, ...]) -> list[Array]:
        with self._lock:
            number = self._calls[(optimizer, tensor)]
            self._calls[(optimizer, tensor)] += 1
        steps = self._trace.steps(optimizer)
        made = steps[number] if number < len(steps) else {}
        found = [one.gradients[tensor] for _, one in sorted(made.items()) if tensor in one.gradients]
        is_whole = all(array.is_complete and array.shape == shape for array in found)
        return [array.read() for array in found] if is_whole else []
