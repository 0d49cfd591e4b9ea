"""Find the user's lines of a call, of an operation of a graph, or of one of a step that runs eagerly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from emulate import upstream
from emulate.program import users

Frames = Sequence[tuple[str, int]]
ORIGINS: dict[tuple[str, int], tuple[str, int]] = {}
"""Lines of functions that autograph has converted, with the user's: threads of MirroredStrategy have no map of them."""


def here() -> Frames:
    """Return the user's lines of this thread's calls, outermost first."""
    return _users(upstream.stack())


def of_operation(operation: Any) -> Frames:
    """Return the user's lines that made an operation, outermost first."""
    own = getattr(operation, "frames", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    # An operation of a loaded SavedModel's function has no traceback (TF 2.21).
    return _users([(frame.filename, frame.lineno) for frame in operation.traceback or ()])


def place_of(operation: Any) -> str:
    """Return the innermost line of the program that made an operation, by the file's name; empty where none has.

    It is the same on all hosts, of which each has other files for what autograph converts.
    """
    frames = of_operation(operation)
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _users(frames: Frames) -> Frames:
    return tuple(users(ORIGINS.get(frame, frame) for frame in frames))


@dataclass(eq=False)
class Operation:
    """Describe an operation that was run, in the words of `tf.Operation`.

    Attributes:
        frames: The user's lines that led to it, outermost first.
        replica: Whose it is; None outside of replicas.
    """

    type: str
    replica: int | None = None
    frames: Frames = ()
    inputs: Sequence[Value] = ()
    outputs: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Value:
    """Describe a tensor without its numbers."""

    op: Operation
    value_index: int
    shape: Any
    dtype: Any


class Operations:
    """Hold the operations of one step. Only numbers of tensors are kept, so that nothing takes up memory."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self.all: list[Operation] = []

    def watch(self, replica: int) -> Any:
        """Remember what this thread runs, as long as the context that is returned lasts."""

        def see(kind: str | bytes, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
            if graph is None:
                self._add(kind if isinstance(kind, str) else kind.decode(), replica, inputs, outputs)

        return upstream.watching_operations(see)

    def _add(self, kind: str, replica: int, inputs: Any, outputs: Any) -> None:
        values = [self.value(tensor) for tensor in inputs]
        operation = Operation(kind, replica, here(), values)
        self.all.append(operation)
        for index, tensor in enumerate(outputs or ()):
            number = upstream.tensor_number(tensor)
            if number is not None:
                value = self._values[number] = Value(operation, index, tensor.shape, tensor.dtype)
                operation.outputs.append(value)

    def value(self, tensor: Any) -> Value:
        """Return a tensor's description; of one that nothing here has made, a new one."""
        number = upstream.tensor_number(tensor)
        value = self._values.get(-1 if number is None else number)
        if value is None:
            value = Value(Operation("Given"), 0, tensor.shape, tensor.dtype)
            value.op.outputs.append(value)
            if number is not None:
                self._values[number] = value
        return value
