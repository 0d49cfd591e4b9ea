"""Cut parts out of the graph of a step: what some of its tensors are computed from, given others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from emulate.probe import upstream
from emulate.probe.functions.state import State

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "Identity")
"""Operations that take a variable and leave it as it is."""


@dataclass(frozen=True)
class Part:
    """Hold a part of a function.

    Attributes:
        inputs: The names of the tensors that it is given.
        fetched: Those of the tensors that it returns.
        assigns: The numbers of the variables that it may assign.
    """

    function: Any
    inputs: Sequence[str]
    fetched: Sequence[str]
    assigns: Sequence[int]


class Parts:
    """Make functions of parts of a graph.

    Args:
        graph: A GraphDef.
        given: The dtype and the shape of the tensors that may be given, by name.
        captures: The captured tensors, each with the number of its variable; None where it has a constant value.
        constants: The values of the others, by their place in `captures`.
        state: The variables.
    """

    def __init__(
        self,
        graph: Any,
        given: Mapping[str, tuple[str, Any]],
        captures: Sequence[tuple[str, int | None]],
        constants: Mapping[int, Any],
        state: State,
    ) -> None:
        for node in [*graph.node, *(node for function in graph.library.function for node in function.node_def)]:
            node.device = ""  # they name the job of a cluster that is not there
            node.attr.pop("_class", None)  # to be placed with operations that may have been left out
        upstream.register_functions(graph)
        self._graph, self._given, self._captures, self._constants = graph, given, captures, constants
        self._nodes = {node.name: node for node in graph.node}
        self._state = state

    def in_turn(
        self,
        groups: Sequence[Sequence[str]],
        given: Iterable[str],
        between: Sequence[Sequence[str]] = (),
        updates: Sequence[str] = (),
    ) -> list[Part]:
        """Return parts that execute each node once, one after the other.

        Args:
            groups: The names of the tensors that each of them fetches. Besides it fetches what later ones need.
            given: Tensors that are given in place of the graph's own.
            between: Tensors that are given besides from the second part on, from the third on, and so on.
            updates: Operations that the last part executes besides.

        Returns:
            The parts.
        """
        known, done = list(given), set[str]()
        cuts = []
        for fetched, more in itertools.zip_longest(groups, between):
            cuts.append(self._cut(fetched, updates if more is None else (), known, done))
            done |= {node.name for node in cuts[-1][0].node}
            known += more or []
        later = dict.fromkeys(name for _, inputs in cuts for name in inputs if name not in known)
        return [
            self._part(graph_def, inputs, list(dict.fromkeys([*fetched, *_made_by(graph_def, later)])))
            for (graph_def, inputs), fetched in zip(cuts, groups, strict=True)
        ]

    def _part(self, graph_def: Any, inputs: Sequence[str], fetched: Sequence[str]) -> Part:
        import tensorflow as tf

        used = _used(graph_def)
        specs = [tf.TensorSpec(shape, dtype) for dtype, shape in map(self.spec, inputs)]

        @tf.function(autograph=False, input_signature=specs)
        def part(*values: Any) -> list[Any]:
            at_hand = dict(zip(inputs, values, strict=True))
            mapped = {name: value for name, value in (self._captured(used) | at_hand).items() if name in used}
            others = [name for name in dict.fromkeys(fetched) if name not in at_hand]
            rest = tf.graph_util.import_graph_def(graph_def, mapped, return_elements=others, name="") if graph_def.node else []
            results = at_hand | dict(zip(others, rest, strict=True))
            return [results[name] for name in fetched]

        return Part(part, inputs, fetched, self._assigns(graph_def))

    def spec(self, name: str) -> tuple[str, Any]:
        """Return the dtype and the shape of a tensor."""
        return self._given[name] if name in self._given else self._told[name]

    @cached_property
    def _told(self) -> dict[str, tuple[str, Any]]:
        import tensorflow as tf

        apart = [name for name in self._given if name in _used(self._graph) and node_of(name) not in self._nodes]
        with tf.Graph().as_default() as graph:
            given = {name: tf.compat.v1.placeholder(*self._given[name]) for name in apart}
            tf.graph_util.import_graph_def(self._graph, given, name="")
        tensors = (tensor for operation in graph.get_operations() for tensor in operation.outputs)
        return {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in tensors}

    def read(self, name: str) -> str | None:
        """Return the name of the captured variable whose value a tensor is; None where it is something else."""
        node = self._nodes.get(node_of(name))
        while node is not None and node.op == "Identity":
            node = self._nodes.get(node_of(node.input[0]))
        return tensor_name(node.input[0]) if node is not None and node.op == "ReadVariableOp" else None

    def _assigns(self, graph_def: Any) -> list[int]:
        """Return the variables that anything but a read takes."""
        taken = {tensor_name(name) for node in graph_def.node if node.op not in READS for name in node.input}
        return sorted({number for name, number in self._captures if number is not None and name in taken})

    def _captured(self, used: set[str]) -> dict[str, Any]:
        import tensorflow as tf

        here = tf.compat.v1.get_default_graph()
        variables = self._state.variables
        return {
            name: tf.constant(self._constants[place]) if number is None else here.capture(variables[number].handle)
            for place, (name, number) in enumerate(self._captures)
            if name in used
        }

    def _cut(
        self, fetched: Sequence[str], updates: Sequence[str], given: Sequence[str], done: Collection[str]
    ) -> tuple[Any, list[str]]:
        """Return the nodes that tensors are computed from where others are given, and what they need of those and of `done`."""
        at_hand = {*given}
        todo = [*(node_of(name) for name in fetched if name not in at_hand), *updates]
        kept: set[str] = set()
        while todo:
            name = todo.pop()
            if name in kept or name in done:
                continue
            kept.add(name)
            before = self._nodes[name].input
            todo += [node_of(entry) for entry in before if entry.startswith("^") or tensor_name(entry) not in at_hand]
        cut = type(self._graph)(library=self._graph.library, versions=self._graph.versions)
        cut.node.extend(node for node in self._graph.node if node.name in kept and node.op != "Placeholder")
        for node in cut.node if done else ():
            inputs = [entry for entry in node.input if not (entry.startswith("^") and node_of(entry) in done)]
            del node.input[:]
            node.input.extend(inputs)
        needed = _used(cut) | {*fetched}
        others = sorted(name for name in needed - at_hand if node_of(name) in done)
        return cut, [*(name for name in dict.fromkeys(given) if name in needed), *others]


def _used(graph_def: Any) -> set[str]:
    return {tensor_name(name) for node in graph_def.node for name in node.input if not name.startswith("^")}


def _made_by(graph_def: Any, names: Iterable[str]) -> list[str]:
    nodes = {node.name for node in graph_def.node}
    return [name for name in names if node_of(name) in nodes]


def tensor_name(name: str) -> str:
    """Return the full name of a tensor: `x:0` for the `x` of a GraphDef."""
    return name if ":" in name else f"{name}:0"


def node_of(name: str) -> str:
    """Return the name of a tensor's node, or that of a control input."""
    return name.removeprefix("^").partition(":")[0]
