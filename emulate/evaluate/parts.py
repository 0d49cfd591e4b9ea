"""Say where the functions of a trace lie, hold their variables, and cut parts out of the graph of a step.

In the folder `host-0/functions` of a trace:

- `state/0.float32.npy`: the first value of each variable that a function reads or assigns, by its number and type;
- `0/graph.pb`: a GraphDef with everything that the recorded tensors of a step are computed from;
- `0/function.json`: its records (kind, about, tensors), its captures (tensor, number of the variable), the tensors of the whole
  batch that it reads outside of `Strategy.run` (key, tensor), and its reductions over the replicas; or a refusal;
- `0/constants.npz`: captured tensors that are no variables, by their place in the captures.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emulate import upstream
from emulate.imports import tf
from emulate.recorder.functions import READS, folder_of, state_of
from emulate.trace import Trace

_NOT_IN_A_GRAPH = "its steps are made in eager code"
_CHANGED_ELSEWHERE = "another function of the program assigns variables that its step reads"
_ROWS_LEFT_OUT = "the examples of a step were not kept whole"


def described(trace: Path, number: int) -> dict[str, Any]:
    """Return what `function.json` says."""
    description: dict[str, Any] = json.loads((folder_of(trace) / str(number) / "function.json").read_text(encoding="utf-8"))
    return description


def graph_of(trace: Path, number: int) -> tuple[Any, dict[int, Any]]:
    """Return the GraphDef of a function, and by their place the captured tensors that are no variables."""
    from tensorflow.core.framework import graph_pb2

    folder = folder_of(trace) / str(number)
    with np.load(folder / "constants.npz", allow_pickle=False) as values:
        constants = {int(place): values[place] for place in values.files}
    return graph_pb2.GraphDef.FromString((folder / "graph.pb").read_bytes()), constants


def fixed_batches(trace: Trace) -> set[int]:
    """Return the sizes of the batches for which the functions of a trace were made; nothing where they take any."""
    numbers = {event["function"] for _, event in trace.of("step")}
    records = [record for number in numbers for record in described(trace.directory, number)["records"]]
    inputs = (shape for record in records for key, _, _, shape in record["tensors"] if key[0] == "input")
    return {shape[0] for shape in inputs if shape and shape[0] is not None}


def counts_the_batch(trace: Trace) -> bool:
    """Return whether a step computes with a number that its function makes of the whole batch, outside of `Strategy.run`."""
    numbers = {event["function"] for _, event in trace.of("step") if "function" in event}
    return any(described(trace.directory, number).get("whole") for number in numbers)


def is_eager(trace: Trace) -> bool:
    """Return whether the program makes its steps in eager code."""
    events = trace.of("step")
    return trace.num_hosts == 1 and bool(events) and not any("function" in event for _, event in events)


def refusal(trace: Trace) -> str | None:
    """Return why the steps of a trace cannot be evaluated by functions; None where they can."""
    events = trace.of("step")
    numbers = {event["function"] for _, event in events if "function" in event}
    if trace.num_hosts != 1 or not events or any("function" not in event for _, event in events):
        return _NOT_IN_A_GRAPH
    functions = {number: described(trace.directory, number) for number in sorted(numbers)}
    if (why := next((function["refusal"] for function in functions.values() if "refusal" in function), None)) is not None:
        return str(why)
    # A function is cut with the assignments of the variables that it reads. Those of variables that only another one reads
    # (one function accumulates, another applies) are not evaluated, and neither is a function that makes no step.
    read = {number: {variable for _, variable in function["captures"]} for number, function in functions.items()}
    changes = [(event["variable"], event["function"]) for _, event in trace.of("changed-in-a-graph")]
    read_by_any = set().union(*read.values())
    if any(variable in read_by_any and variable not in read.get(function, ()) for variable, function in changes):
        return _CHANGED_ELSEWHERE
    steps = [step for name in trace.optimizers for replicas in trace.steps(name) for step in replicas.values()]
    are_whole = all(array is not None and array.is_complete for step in steps for array in step.inputs)
    return None if are_whole else _ROWS_LEFT_OUT


_CYCLE = 509
"""After so many elements their changes by units in the last place come again."""


class State:
    """Hold the variables of a run's functions, whose values are the state of a step.

    Args:
        trace: The folder of the run's trace.
    """

    def __init__(self, trace: Path) -> None:
        self.variables: dict[int, Any] = {}
        for file in state_of(folder_of(trace)).glob("*.npy"):
            number, dtype, _ = file.name.split(".")
            self.variables[int(number)] = tf.Variable(tf.cast(np.load(file, allow_pickle=False), dtype), trainable=False)

    def read(self, numbers: Iterable[int]) -> Mapping[int, Any]:
        """Return the values of some variables, by their number."""
        return {number: self.variables[number].read_value() for number in numbers}

    def assign(self, values: Mapping[int, Any]) -> None:
        """Go back to values that `read` has returned."""
        for number, value in values.items():
            self.variables[number].assign(value)

    def shift(self, numbers: Sequence[int], units: float, seed: int) -> None:
        """Change each element of some variables by up to so many units in the last place.

        Args:
            numbers: The variables.
            units: By how many, at most.
            seed: Which change.
        """
        generator = np.random.default_rng(seed)
        for variable in (self.variables[number] for number in numbers):
            if variable.dtype.is_floating:
                value = variable.numpy()
                size = np.finfo(np.float64 if value.dtype == np.float64 else np.float32).eps
                factors = (1 + units * size * generator.uniform(-1, 1, _CYCLE)).astype(value.dtype)
                factors = np.tile(factors, -(-value.size // _CYCLE))[: value.size]
                variable.assign(value * factors.reshape(value.shape))


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

        # What anything but a read takes may be assigned.
        taken = {tensor_name(name) for node in graph_def.node if node.op not in READS for name in node.input}
        assigned = sorted({number for name, number in self._captures if number is not None and name in taken})
        return Part(part, inputs, fetched, assigned)

    def spec(self, name: str) -> tuple[str, Any]:
        """Return the dtype and the shape of a tensor."""
        return self._given[name] if name in self._given else self._told[name]

    @cached_property
    def _told(self) -> dict[str, tuple[str, Any]]:
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

    def _captured(self, used: set[str]) -> dict[str, Any]:
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
