"""Walk over the operations between two points of a step, and say what each does there.

It is told by types and shapes: which tensors depend on examples, which on variables, which still have one entry an example.
Operations are those of a graph, or of eager code (eager.py): both have `type`, `inputs`, `outputs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from emulate.probe.distributions import DRAWN

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
        rows: The tensors that hold examples.
        sizes: Their numbers of examples, as far as they are known.
        enter: Whether what enters a function may hold examples, too: where it is the function of a loop.
    """

    def __init__(
        self, operations: Collection[Any], rows: Collection[Key], sizes: Collection[int] = (), *, enter: bool = True
    ) -> None:
        self._rows, self._sizes, self._enter = rows, sizes, enter
        self._known: dict[Any, Flow] = {}
        for operation in in_order(operations):
            self._known[operation] = self._of_operation(operation)

    def of(self, tensor: Any) -> Flow:
        """Return what a tensor depends on."""
        if key_of(tensor) in self._rows:
            return Flow(rows=True, batched=True)
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
    """Return whether an operation draws random numbers, or the probe has put its result in the place of one that does."""
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
    if operation.type == "Range" and any(operand.op.type != "Const" for operand in operation.inputs):
        words.add("numbers")  # from 0 on, of as many as something has: of a replica's own examples, say
    is_of_table = operation.type == "GatherV2" and inputs[0].weights and not inputs[0].rows
    if operation.type in _LOOKUPS or is_of_table:
        words.add("looks-up" if inputs[1].rows else "looks-up-the-same")
    if not any(flow.rows for flow in inputs):
        return words
    of_weights = any(flow.weights and not flow.rows for flow in inputs)
    if operation.type in _SUMS and of_weights:
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
    import tensorflow as tf

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


def counts(operations: Collection[Any], flows: Flows) -> set[Any]:
    """Return the reductions that make a divisor of the data alone: a number of tokens, a sum of weights."""
    reductions: set[Any] = set()
    for operation in operations:
        if operation.type in _DIVISIONS and _is_count(flows.of(operation.inputs[1])):
            behind = region([operation.inputs[1]], (), lambda op: op.type not in _REDUCTIONS)
            reductions |= {op for op in behind if op.type in _REDUCTIONS and flows.of(op.inputs[0]).batched}
    return reductions


def _is_count(flow: Flow) -> bool:
    return flow.rows and not flow.batched and not flow.weights


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
