"""Describe what a replica's step computes, so that it can be compared with other replicas and with another topology.

The description holds what one function of a step has in a graph: its operations in the order in which they were made, with what
each takes. Left out are names, devices, seeds and variables, which replicas have of their own; what collectives and the other
replicas make is an input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulate import graph_functions
from emulate.probe import upstream
from emulate.probe.lines import upstream as of_lines
from emulate.probe.lines import walks

_OF_EACH = {"seed", "seed2", "token", "container", "shared_name", "num_elements", "config_proto"}
"""Attributes that two traces of one function do not share.

`num_elements` is the number of examples in `tf.map_fn`; `config_proto` has the number of devices (TF 2.21).
"""
_LARGEST = 64
"""Constants of so many elements are kept."""


@dataclass
class ReplicaGraph:
    """Hold the operations of a replica's step.

    Attributes:
        operations: [type, digest of its attributes, inputs]; an input is [operation, output], or [leaf].
        leaves: [dtype, value] of what the step does not compute. The value is that of a constant, `number` for a tensor that
            holds the replica's number, else None.
        made: The operations themselves.
        forward: How many of them were made up to the loss.
    """

    operations: list[list[Any]] = field(default_factory=list)
    leaves: list[list[Any]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    forward: int = 0

    def content(self) -> dict[str, Any]:
        """Return what is compared."""
        return {"operations": self.operations, "leaves": self.leaves, "forward": self.forward}


def describe(graph: Any, ends: Collection[Any], loss: Collection[Any], rows: Collection[Any], owner: Any) -> ReplicaGraph:
    """Return the description of what a replica computes.

    Args:
        graph: In which it is traced.
        ends: The tensors that its step makes.
        loss: Those of them that gradients are taken of.
        rows: The tensors that hold its examples, by their keys.
        owner: Returns whether the replica makes an operation.

    Returns:
        The description.
    """
    builder = _Builder(ReplicaGraph(), rows)
    own, before = walks.region(ends, rows, owner), walks.region(loss, rows, owner)
    for operation in graph.get_operations():
        if operation in own and owner(operation) and operation.type not in _NOT_LISTED:
            builder.add(operation)
            if operation in before:
                builder.graph.forward = len(builder.graph.operations)
    return builder.graph


_NOT_LISTED = ("Placeholder", "Const", "Identity")
"""Inputs of the step, and what has its input as its result: gpudist adds Identity to some runs and not to others."""


class _Builder:
    def __init__(self, graph: ReplicaGraph, rows: Collection[Any]) -> None:
        self.graph, self._rows = graph, rows
        self._places: dict[Any, int] = {}
        self._leaves: dict[walks.Key, int] = {}
        virtual = graph_functions.virtual_replicas()
        self._number = None if virtual is None else walks.key_of(virtual[0])

    def add(self, operation: Any) -> None:
        """Add an operation, and after it those of the functions that it calls."""
        definition = operation.node_def
        inputs = [self._input(tensor) for tensor in operation.inputs]
        self._places[operation] = len(self.graph.operations)
        self.graph.operations.append([operation.type, _attributes(definition), inputs])
        self.graph.made.append(operation)
        for inner in _called(operation.graph, definition):
            if inner.type not in _NOT_LISTED:
                self.add(inner)

    def _input(self, tensor: Any) -> list[int]:
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        place = self._places.get(tensor.op)
        if place is not None:
            return [place, int(tensor.value_index)]
        key = walks.key_of(tensor)
        if key not in self._leaves:
            self._leaves[key] = len(self.graph.leaves)
            self.graph.leaves.append([tensor.dtype.name, self._value(tensor, key)])
        return [self._leaves[key]]

    def _value(self, tensor: Any, key: walks.Key) -> Any:
        import tensorflow as tf

        if key == self._number:
            return "number"
        if key in self._rows:
            return None  # examples, also those of a batch that the program captures
        if tensor.op.type == "Const":
            return _kept(tf.make_ndarray(tensor.op.get_attr("value")))
        outer = next((outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor), None)
        origin = None if outer is None else upstream.eager_origin(outer, tensor.graph)
        if origin is None or origin.dtype in (tf.resource, tf.variant):
            return None
        return _kept(np.asarray(origin))


def _kept(value: Any) -> Any:
    """Return a constant's elements, or of many one where all are equal, else their digest."""
    if value.dtype.kind in "biuf":
        if value.size > _LARGEST and bool((value == value.flat[0]).all()):
            value = value.reshape(-1)[:1]
        if value.size <= _LARGEST:
            return [element if np.isfinite(element) else repr(element) for element in value.reshape(-1).tolist()]
    contents = repr(value.tolist()).encode() if value.dtype.kind == "O" else np.ascontiguousarray(value).tobytes()
    return hashlib.blake2b(contents, digest_size=8).hexdigest()


def _attributes(definition: Any) -> str:
    state = hashlib.blake2b(digest_size=6)
    for name, value in sorted(definition.attr.items()):
        # Static shapes follow from the examples and the variables; names of functions are others in each trace.
        is_shape = value.HasField("shape") or bool(value.list.shape)
        if not (name in _OF_EACH or name.startswith("_") or is_shape or list(_names(value))):
            state.update(name.encode() + value.SerializeToString(deterministic=True))
    return state.hexdigest()


def _names(value: Any) -> Iterator[str]:
    """Yield the names of functions in an attribute: those of a condition, a loop or a call."""
    if value.HasField("func"):
        yield value.func.name
    yield from (function.name for function in value.list.func)


def _called(graph: Any, definition: Any) -> Iterator[Any]:
    """Yield the operations of the functions that an operation calls."""
    for _, value in sorted(definition.attr.items()):
        for name in _names(value):
            yield from of_lines.operations_of(graph, name)
