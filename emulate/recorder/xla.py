"""Take records out of a function that XLA compiles: they are results of it, and are handed over after its call.

XLA compiles no queue and no call of Python. So what is recorded in such a function leaves it beside its own results, which the
program gets as if there were nothing else. What the function is given in place of its own numbers is read before each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from emulate import graph_functions
from emulate.imports import tf

_releases: list[Callable[[list[Any]], Any]] = []
_ATTRIBUTE = "_gpudist_outlet"


class Outlet:
    """Collect what leaves one graph that XLA compiles.

    Args:
        graph: The graph of the function.

    Attributes:
        tensors: What leaves it so far, by the number of what records it.
    """

    def __init__(self, graph: Any) -> None:
        self.graph, self.tensors = graph, dict[str, list[Any]]()
        setattr(graph, _ATTRIBUTE, self)

    def add(self, release: Callable[[list[Any]], Any], tensors: list[Any]) -> None:
        """Have `release` called after each call of the function with the values of these tensors.

        Args:
            release: What records them.
            tensors: Of the graph itself.

        Raises:
            RuntimeError: Where they are in a condition, a loop or another function of it, which they cannot leave.
        """
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise RuntimeError(
                "gpudist cannot record a step in a condition, a loop or a function inside of a function under XLA"
            )
        self.tensors[f"{len(_releases):06d}"] = [tf.identity(tensor) for tensor in tensors]
        _releases.append(release)


def outlet() -> Outlet | None:
    """Return the outlet of the graph under construction; None outside of XLA."""
    found: Outlet | None = graph_functions.found_on_graphs(_ATTRIBUTE)
    return found


def collecting(function: Callable[..., Any], *, autograph: bool) -> Callable[..., Any]:
    """Return the function of a `tf.function` that XLA compiles, with what leaves it beside its result."""

    @graph_functions.do_not_convert
    @functools.wraps(function, updated=())  # not its mark of autograph, by which TensorFlow would call it directly
    def collect(*args: Any, **kwargs: Any) -> Any:
        inner = graph_functions.convert(function, enabled=autograph)
        if outlet() is not None:  # a strategy has put it into another function that XLA compiles
            return inner(*args, **kwargs)
        own = Outlet(tf.compat.v1.get_default_graph())
        return inner(*args, **kwargs), own.tensors

    return collect


def release(returned: Any) -> Any:
    """Record what has left a function that collects, and return the function's own result."""
    result, tensors = returned
    for number, values in sorted(tensors.items()):
        _releases[int(number)](values)
    return result
