"""Walk over the operations between two points of a step, and say what each does there.

It is told by types and shapes: which tensors depend on examples, which on variables, which still have one entry an example.
Operations are those of a graph, or of eager code (stack_lines.py): both have `type`, `inputs`, `outputs`.

`describe` says what a replica's step computes, so that it can be compared with other replicas and with another topology. The
description holds what one function of a step has in a graph: its operations in the order in which they were made, with what
each takes. Left out are names, devices, seeds and variables, which replicas have of their own; what collectives and the other
replicas make is an input.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.recorder.row_keys import DRAWN

Key = tuple[int, int]

_ABOUT_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
_LOOKUPS = {"ResourceGather", "ResourceGatherNd"}
_READS = {"ReadVariableOp", *_LOOKUPS}
_DIVISIONS = {"RealDiv", "Div", "DivNoNan", "Xdivy"}
_SUMS = {"Add", "AddV2", "AddN", "Sub"}
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"}
_BY_CLASS = {"Bincount", "DenseBincount", "UnsortedSegmentSum", "SegmentSum", "SegmentMean"}
"""Reductions whose results have an entry for each class, however many that are."""
_MOVES_ROWS = {"ReverseV2", "Roll", "TopKV2", "Cumsum", "CumulativeLogsumexp", "GatherV2", "StridedSlice", "RandomShuffle"}
"""May bring an example's row to another one's place, or add rows up."""
_REDUCTIONS = {"Sum", "Mean", "Prod", "Max", "Min", "Any", "All", "EuclideanNorm", "L2Loss", *_BY_CLASS}
_NORMS = {"L2Loss", "EuclideanNorm", "Sqrt", "Rsqrt", "Minimum", "Maximum", "ClipByValue", "SelectV2"}
_NORMALIZES_BATCH = "FusedBatchNorm"
_DRAWS = ("Random", "StatelessRandom", "StatelessTruncated", "Stateful", "Multinomial", "TruncatedNormal")


@dataclass(frozen=True)
class Flow:
    """Describe what a tensor depends on.

    Attributes:
        rows: Whether it depends on the examples.
        batched: Whether it still has an entry for each of them.
        weights: Whether it depends on variables.
    """

    rows: bool = False
    batched: bool = False
    weights: bool = False


def key_of(tensor: Any) -> Key:
    """Return what identifies a tensor as long as its operation lives."""
    return id(tensor.op), int(tensor.value_index)


def region(ends: Iterable[Any], stops: Collection[Key] = (), through: Any = None) -> dict[Any, int]:
    """Return the operations that tensors are made of, each with its distance from them, nearest first.

    Args:
        ends: The tensors.
        stops: Tensors at which the walk ends.
        through: Whether the walk goes on behind an operation; every one unless given.

    Returns:
        The distance of each operation.
    """
    distances: dict[Any, int] = {}
    waiting = deque((tensor, 0) for tensor in ends if key_of(tensor) not in stops)
    while waiting:
        tensor, distance = waiting.popleft()
        if tensor.op in distances:
            continue
        distances[tensor.op] = distance
        if through is None or through(tensor.op):
            waiting += [(operand, distance + 1) for operand in tensor.op.inputs if key_of(operand) not in stops]
    return distances


def in_order(operations: Collection[Any]) -> list[Any]:
    """Return operations so that each comes after those whose results it takes."""
    done: dict[Any, None] = {}
    for first in operations:
        waiting = [(first, False)]
        while waiting:
            operation, is_ready = waiting.pop()
            if operation in done:
                continue
            if is_ready:
                done[operation] = None
                continue
            waiting.append((operation, True))
            waiting += [(t.op, False) for t in operation.inputs if t.op in operations and t.op not in done]
    return list(done)


class Flows:
    """Say of each tensor of a region what it depends on.

    Args:
        operations: The region.
        rows: The tensors that hold examples; or what tensors depend on.
        sizes: Their numbers of examples, as far as they are known.
        enter: Whether what enters a function may hold examples, too: where it is the function of a loop.
    """

    def __init__(
        self,
        operations: Collection[Any],
        rows: Collection[Key] | Mapping[Key, Flow],
        sizes: Collection[int] = (),
        *,
        enter: bool = True,
    ) -> None:
        self._rows, self._sizes, self._enter = rows, sizes, enter
        self._known: dict[Any, Flow] = {}
        for operation in in_order(operations):
            self._known[operation] = self._of_operation(operation)

    def of(self, tensor: Any) -> Flow:
        """Return what a tensor depends on."""
        if key_of(tensor) in self._rows:
            return self._rows[key_of(tensor)] if isinstance(self._rows, Mapping) else Flow(rows=True, batched=True)
        return self._known.get(tensor.op, Flow())

    def dims(self, tensor: Any) -> int:
        """Return how many dimensions of a tensor may count the examples."""
        shape = dims_of(tensor)
        return sum(dim is None or dim in self._sizes for dim in shape) if shape is not None else 1

    def _of_operation(self, operation: Any) -> Flow:
        if operation.type in _ABOUT_SHAPES or not operation.outputs:
            return Flow()
        output = operation.outputs[0]
        if operation.type == "Placeholder":
            is_rows = self._enter and output.dtype.name not in ("resource", "variant") and self.dims(output) > 0
            return Flow(rows=is_rows, batched=is_rows)
        inputs = [self.of(operand) for operand in operation.inputs]
        if _draws(operation) and self.dims(output) > 0:
            return Flow(rows=True, batched=True)  # examples that the step draws itself, as a generator's
        reads = operation.type in _READS or any(operand.dtype.name == "resource" for operand in operation.inputs)
        return Flow(
            rows=any(flow.rows for flow in inputs),
            batched=any(flow.batched for flow in inputs) and self._keeps_rows(operation, output),
            weights=reads or any(flow.weights for flow in inputs),
        )

    def _keeps_rows(self, operation: Any, output: Any) -> bool:
        shape = dims_of(output)
        if operation.type in _BY_CLASS or (shape is not None and all(dim == 1 for dim in shape)):
            return False
        if operation.type in _REDUCTIONS and shape is not None:
            first = dims_of(operation.inputs[0])
            return bool(shape) and (not first or shape[0] == first[0] != 1 or self.dims(output) > 0)
        return operation.type not in _PRODUCTS or self.dims(output) > 0 or self._keeps_merged_rows(operation)

    def _keeps_merged_rows(self, operation: Any) -> bool:
        """Return whether a product's rows are examples times positions, as a Dense layer makes them of three dimensions."""
        if operation.type != "MatMul" or not self.of(operation.inputs[0]).batched:
            return False
        (of_result, _), (rows, _) = (dims_of(tensor) or (None, None) for tensor in (operation.outputs[0], operation.inputs[0]))
        if rows is None or rows != of_result:
            return False
        source = operation.inputs[0].op
        while source.type in ("Reshape", "Identity"):
            source = source.inputs[0].op
        # tf.tensordot moves the axis that it sums over to the end: then the examples no longer lead.
        return source.type != "Transpose" and any(size and rows % size == 0 for size in self._sizes)


def _draws(operation: Any) -> bool:
    """Return whether an operation draws random numbers, or its result stands in the place of one that does."""
    return operation.type.startswith(_DRAWS) or DRAWN in getattr(operation, "name", "")


def dims_of(tensor: Any) -> list[int | None] | None:
    """Return the static shape of a tensor; None where not even the rank is known."""
    shape = tensor.shape
    return None if shape.rank is None else shape.as_list()


def roles(operation: Any, flows: Flows) -> set[str]:
    """Return what an operation does with the examples: words that the causes ask for."""
    inputs = [flows.of(operand) for operand in operation.inputs]
    output = flows.of(operation.outputs[0]) if operation.outputs else Flow()
    words = {"norm"} if operation.type in _NORMS else set()
    if _draws(operation):
        words.add("draw")
    if operation.type in ("IsFinite", "IsInf", "IsNan"):
        words.add("finite")
    if operation.type == "Range" and any(operand.op.type != "Const" for operand in operation.inputs):
        words.add("numbers")  # from 0 on, of as many as something has: of a replica's own examples, say
    is_of_table = operation.type == "GatherV2" and inputs[0].weights and not inputs[0].rows
    if operation.type in _LOOKUPS or is_of_table:
        words.add("looks-up" if inputs[1].rows else "looks-up-the-same")
    if not any(flow.rows for flow in inputs):
        return words
    # A term of the weights is one number; what has a dimension, such as the bias of a layer with one output, is none.
    terms = [operand for operand, flow in zip(operation.inputs, inputs, strict=True) if flow.weights and not flow.rows]
    if operation.type in _SUMS and not all(map(dims_of, terms)):
        words.add("penalty")
    if operation.type in _REDUCTIONS and inputs[0].batched and not output.batched:
        words.add("mean" if operation.type == "Mean" else "sum")
    if operation.type in {*_DIVISIONS, "Mul"} and _is_scaled(operation, inputs):
        words.add("scale")
    if operation.type in {*_DIVISIONS, "Mul"} and all(flow.rows and not flow.batched for flow in inputs[:2]):
        words.add("ratio")  # or a product of what examples are reduced to: no sum over the replicas either
    if operation.type in _MOVES_ROWS and inputs[0].batched and not _takes_all_rows(operation):
        words.add("moves")
    return words | _mixing(operation, inputs, output, flows)


def _takes_all_rows(operation: Any) -> bool:
    """Return whether a slice leaves the first dimension as it is: `x[:, None]`."""
    if operation.type != "StridedSlice" or not hasattr(operation, "get_attr"):
        return False
    first = {name: bool(operation.get_attr(f"{name}_mask") & 1) for name in ("begin", "end", "new_axis", "shrink_axis")}
    strides = tf.get_static_value(operation.inputs[3])
    is_whole = first["begin"] and first["end"] and not (first["new_axis"] or first["shrink_axis"])
    return is_whole and strides is not None and strides[0] == 1


def _is_scaled(operation: Any, inputs: list[Flow]) -> bool:
    """Return whether one number, which depends on neither examples nor variables, multiplies or divides."""
    others = [tensor for tensor, flow in zip(operation.inputs, inputs, strict=True) if not flow.rows and not flow.weights]
    return len(others) == 1 and dims_of(others[0]) == []


def _mixing(operation: Any, inputs: list[Flow], output: Flow, flows: Flows) -> set[str]:
    """Return whether an example's result depends on other examples here, by weights or by data alone."""
    if not operation.outputs or not operation.outputs[0].dtype.is_floating:
        return set()
    if operation.type.startswith(_NORMALIZES_BATCH):
        return {"mixes"}
    batched = [flow for flow in inputs if flow.batched]
    meets = batched and any(flow.rows and not flow.batched for flow in inputs) and output.batched
    widens = len(batched) > 1 and flows.dims(operation.outputs[0]) > max(flows.dims(operand) for operand in operation.inputs)
    widens |= len(batched) > 1 and operation.type == "MatMul"  # of matrices whose rows or columns are examples
    if operation.type in _PRODUCTS and len(batched) > 1 and not output.batched:
        return {"contracts"}
    if not (meets or widens):
        return set()
    return {"mixes" if output.weights else "mixes-data"}


def roles_inside(operations: Collection[Any], flows: Flows, sizes: Collection[int]) -> Iterator[tuple[Any, Any, set[str]]]:
    """Yield each call with each operation of the functions that it calls, and what that does with the examples."""
    for call in operations:
        for body in _bodies(call) if hasattr(call, "node_def") else ():  # eager code has no graph
            given = zip(reversed(body.inputs), reversed(call.inputs), strict=False)  # a condition has its predicate before them
            inner, entering = body.get_operations(), {key_of(inside): flows.of(outside) for inside, outside in given}
            flows_inside = Flows(inner, entering, sizes, enter=False)
            yield from ((call, operation, roles(operation, flows_inside)) for operation in inner)
            yield from ((call, operation, words) for _, operation, words in roles_inside(inner, flows_inside, sizes))


def counts(operations: Collection[Any], flows: Flows) -> set[Any]:
    """Return the reductions that make a divisor of the data alone: a number of tokens, a sum of weights."""
    reductions: set[Any] = set()
    for operation in operations:
        divisor = flows.of(operation.inputs[1]) if operation.type in _DIVISIONS else Flow()
        if divisor.rows and not divisor.batched and not divisor.weights:
            behind = region([operation.inputs[1]], (), lambda op: op.type not in _REDUCTIONS)
            reductions |= {op for op in behind if op.type in _REDUCTIONS and flows.of(op.inputs[0]).batched}
    return reductions


def crossings(operations: Iterable[Any], owner: Any, rows: Mapping[int, Collection[Key]]) -> Iterable[tuple[Any, Any]]:
    """Return operations of one replica that take, from no collective, what another one made of its examples.

    Args:
        operations: Those of the graph in which the replicas were traced.
        owner: Returns the replica that made an operation, None for none.
        rows: By replica the tensors that hold its examples.

    Returns:
        Each with the tensor that it takes.
    """
    every = list(operations)
    taken = [(op, tensor) for op in every for tensor in op.inputs if _is_of_another(op, tensor, owner)]
    owners = {owner(tensor.op) for _, tensor in taken}
    flows = {r: Flows(region([t for _, t in taken if owner(t.op) == r]), rows.get(r, ()), enter=False) for r in owners}
    return [(op, tensor) for op, tensor in taken if flows[owner(tensor.op)].of(tensor).rows]


def _is_of_another(operation: Any, tensor: Any, owner: Any) -> bool:
    reader, maker = owner(operation), owner(tensor.op)
    return None not in (reader, maker) and reader != maker and tensor.dtype.name not in ("resource", "variant")


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
    own, before = region(ends, rows, owner), region(loss, rows, owner)
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
        self._leaves: dict[Key, int] = {}
        virtual = graph_functions.virtual_replicas()
        self._number = None if virtual is None else key_of(virtual[0])

    def add(self, operation: Any) -> None:
        """Add an operation, and after it those of the functions that it calls."""
        definition = operation.node_def
        inputs = [self._input(tensor) for tensor in operation.inputs]
        self._places[operation] = len(self.graph.operations)
        kind = "Call" if upstream.is_function(operation.graph, operation.type) else operation.type
        self.graph.operations.append([kind, _attributes(definition), inputs])
        self.graph.made.append(operation)
        for body in _bodies(operation):
            for inner in body.get_operations():
                if inner.type not in _NOT_LISTED:
                    self.add(inner)

    def _input(self, tensor: Any) -> list[int]:
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        place = self._places.get(tensor.op)
        if place is not None:
            return [place, int(tensor.value_index)]
        key = key_of(tensor)
        if key not in self._leaves:
            self._leaves[key] = len(self.graph.leaves)
            self.graph.leaves.append([tensor.dtype.name, self._value(tensor, key)])
        return [self._leaves[key]]

    def _value(self, tensor: Any, key: Key) -> Any:
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
        if not (name in _OF_EACH or name.startswith("_") or is_shape or list(_names_of(value))):
            state.update(name.encode() + value.SerializeToString(deterministic=True))
    return state.hexdigest()


def _names_of(value: Any) -> Iterator[str]:
    """Yield the names of functions in an attribute: those of a condition, a loop or a call."""
    if value.HasField("func"):
        yield value.func.name
    yield from (function.name for function in value.list.func)


def _bodies(operation: Any) -> Iterator[Any]:
    """Yield the graphs of the functions that an operation calls: by its type, or by its attributes."""
    definition = operation.node_def
    if upstream.is_function(operation.graph, definition.op):
        yield upstream.body_of(operation.graph, definition.op)
    for _, value in sorted(definition.attr.items()):
        for name in _names_of(value):
            yield upstream.body_of(operation.graph, name)
