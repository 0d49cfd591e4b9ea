"""Track what a program schedules on parameter-server workers, and whether it leaves the order of its updates to chance."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from emulate import graph_functions
from gpudist_core.state import PerThread

processing = PerThread(False)
"""True in the thread of a worker, while that brings the value of a function."""


@final
class Coordinated:
    """Track the functions that a program has scheduled.

    Args:
        on_asynchronous: Called when an update is made while something scheduled before has not been waited for.
    """

    def __init__(self, on_asynchronous: Callable[[], None]) -> None:
        self._on_asynchronous = on_asynchronous
        self._is_asynchronous = False
        self._waiting: set[int] = set()
        self._number = 0
        # Graphs of functions, with those that they are traced in.
        self._updating: weakref.WeakSet[Any] = weakref.WeakSet()
        self._taping: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave_order_to_chance(self) -> None:
        """Note that the program is asynchronous."""
        if not self._is_asynchronous:
            self._is_asynchronous = True
            self._on_asynchronous()

    def see_update(self) -> None:
        """Note that an optimizer applies gradients here."""
        if not _mark(self._updating) and self._waiting:
            self.leave_order_to_chance()

    def see_tape(self) -> None:
        """Note that a gradient is taken here."""
        _mark(self._taping)

    def see_run(self) -> None:
        """Note that a replica's function is called here: it records its own inputs."""
        _mark(self._running)

    def makes_gradients_of_its_arguments(self, graph: Any) -> bool:
        """Return whether a scheduled function is the equivalent of a replica's function, and the next step to make."""
        return graph in self._taping and graph not in self._running and not self._is_asynchronous

    def scheduled(self, graph: Any) -> int:
        """Note that a function is scheduled, and return its number."""
        if graph in self._updating and self._waiting:
            self.leave_order_to_chance()
        self._number += 1
        self._waiting.add(self._number)
        return self._number

    def waited_for(self, number: int | None = None) -> None:
        """Note that the program has seen the end of a function, or of all."""
        if number is None:
            self._waiting.clear()
        elif not processing.value:
            self._waiting.discard(number)


def _mark(graphs: weakref.WeakSet[Any]) -> bool:
    """Remember the graph that is being built, and those around it; False in eager code."""
    built = list(graph_functions.graphs_being_built())
    graphs.update(built)
    return bool(built)
