"""Fix how TensorFlow 2.21 passes the keys of collectives to a tf.function that is called inside `cond` or `while`.

A collective's key is captured at call time. Called in a branch of a `cond`, the function asks the branch for the key, and a
branch is never fed one: `You must feed a value for placeholder tensor 'cond/else/_1/cond/Placeholder_2'`. That stops
`steps_per_execution` and optimizers that are built inside a tf.function. Here the function around the `cond` is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream


def defer_past_control_flow(tell: Callable[[], None]) -> None:
    """Change TensorFlow's graphs of functions; call once in a process.

    Args:
        tell: Called whenever a program needs it.
    """
    cls = upstream.function_graph_class()
    real = cls.capture_call_time_value

    @functools.wraps(real)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = self
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        if graph is not self:
            tell()
        with graph.as_default():
            return real(graph, *args, **kwargs)

    cls.capture_call_time_value = capture
