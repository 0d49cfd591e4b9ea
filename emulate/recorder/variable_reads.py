"""See which of the variables that steps assign a step reads for anything but its own next value, a report or a print.

A loss that is made of a variable counts where its gradients are returned, and are applied in a call that is traced by itself.
Where the same call applies them, their way to the weights says whether they depend on the variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.recorder.replica_call import Body

_ONLY_TAKE_NOTE = ("Queue", "Write", "Collective")
"""Operations on gpudist's records, on summaries, and with a token for their order."""


class VariableReads:
    """Find the variables whose values reach a loss or another variable, in the graphs of all steps."""

    def __init__(self) -> None:
        self._captured: set[int] = set()
        self._read: set[int] = set()
        self._assigned: dict[str, dict[int, Any]] = {}
        self._is_blind = False

    def see(self, body: Body, assigned: Mapping[str, Any]) -> dict[str, bool]:
        """Look at a call that has just been traced.

        Args:
            body: The call.
            assigned: The variables that it assigns, by name.

        Returns:
            By the name of each variable that a call assigned whether a step reads it; also true where that is not seen.
        """
        for name, variable in assigned.items():
            self._assigned[name] = {id(copy.handle): copy.handle for copy in upstream.local_copies(variable)}
        if hasattr(body.graph, "captures"):
            self._look(body.graph, {id(tensor) for tensor in body.objective})
        else:
            self._is_blind = True
        return {name: self._is_blind or self._may_read(handles.keys()) for name, handles in self._assigned.items()}

    def _look(self, graph: Any, targets: Collection[int]) -> None:
        names = {handle: name for name, handles in self._assigned.items() for handle in handles}
        groups: dict[Any, dict[int, Any]] = {}
        for captured, inner in _handles(graph):
            groups.setdefault(names.get(id(captured), id(captured)), {})[id(captured)] = inner
        for handles in groups.values():
            self._captured |= handles.keys()
            if _is_used(handles.values(), targets):
                self._read |= handles.keys()

    def _may_read(self, handles: Collection[int]) -> bool:
        return not self._read.isdisjoint(handles) or self._captured.isdisjoint(handles)


def _handles(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each variable's handle that a graph takes from outside, with the tensor that stands for it there."""
    for outer, inner in graph.captures:
        captured = upstream.eager_origin(outer, graph)
        if inner.dtype == tf.resource and captured is not None:
            yield captured, inner


def _is_used(handles: Iterable[Any], targets: Collection[int]) -> bool:
    """Return whether what is computed with a variable becomes one of the targets, or is given to another resource."""
    own = {id(handle) for handle in handles}
    ahead = list(handles)
    seen = set(own)
    while ahead:
        tensor = ahead.pop()
        for operation in tensor.consumers():
            others = [i for i in operation.inputs if i.dtype == tf.resource and id(i) not in own]
            if others and not operation.type.startswith(_ONLY_TAKE_NOTE):
                return True
            new = [output for output in operation.outputs if id(output) not in seen]
            if any(id(output) in targets for output in operation.outputs):
                return True
            seen.update(map(id, new))
            # What is assigned to the variable itself has no result, and an operation that passes a handle on has it as one.
            own.update(id(output) for output in new if output.dtype == tf.resource and operation.type == "Identity")
            ahead += new
    return False
