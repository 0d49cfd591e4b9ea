"""Count the floating-point operations of a recorded step, and the peak of the bytes that it keeps in memory on one device.

The operations are those of products and convolutions, which decide the time of a step. For the bytes its graph is replayed in
the order of TensorFlow's executor.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate.evaluate.parts import State, fixed_batches
from emulate.evaluate.step_function import StepFunction
from emulate.trace import Trace

Size = NDArray[np.float64]
"""Bytes of a buffer: what does not depend on the batch; of each example; of it what is float32."""

_SAME_BUFFER = """
CheckNumerics EnsureShape ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient
"""
"""Operations whose outputs are their inputs' buffers under another shape or name."""
_IN_PLACE = """
Abs Acos Add AddN AddV2 Asin Atan Atan2 BiasAdd Ceil ClipByValue Cos Cosh Div DivNoNan Elu EluGrad Erf Erfc Erfinv Exp Expm1
Floor FloorDiv FloorMod Inv InvGrad LeakyRelu LeakyReluGrad Lgamma Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr Maximum
Minimum Mod Mul MulNoNan Neg Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad
Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh SoftmaxCrossEntropyWithLogits Softmax Softplus SoftplusGrad
Softsign SoftsignGrad SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad Xdivy
Xlogy
"""
"""Operations that write into the buffer of an input of the same shape that nothing else needs.

Source: calls of forward_input_or_allocate_output in tensorflow/core/kernels (2.21)."""
_CHEAP = "Const ExpandDims Identity NoOp Placeholder Rank ReadVariableOp Reshape Shape ShapeN Size Squeeze StopGradient"
"""Operations that come before all others: their kernels return false in IsExpensive(), or read a variable.

TensorFlow may read a variable later: the graph does not tell in which order operations without inputs come."""
_WITH_BODIES = "Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While"
"""Operations that call functions, whose tensors are not in the graph."""


@dataclass(eq=False)
class _Buffer:
    """Hold how many operations still need a buffer, and whether it counts: those of variables and constants do not."""

    size: Size
    counts: bool = True
    users: int = 0


class LiveBytes:
    """Replay one step.

    Args:
        graph: Of the whole step.
        examples: In the step.
        other: Of its forward and backward pass with another number of examples, and that number; None where there is none.
        gradients: The names of the tensors that optimizers are given.

    Attributes:
        scales: Whether sizes for other batches are known.
        uncounted: Types of operations some of whose buffers are not counted, as nobody knows their size.
    """

    def __init__(self, graph: Any, examples: int, other: tuple[Any, int] | None, gradients: AbstractSet[str]) -> None:
        self.scales = other is not None
        self._operations = [op for op in graph.get_operations() if op.type != "IdentityN"]
        self._gradients = {_origin(tensor) for op in self._operations for tensor in op.outputs if tensor.name in gradients}
        self._in_place, self._same_buffer = frozenset(_IN_PLACE.split()), frozenset(_SAME_BUFFER.split())
        self.uncounted = {op.type for op in self._operations if op.type in _WITH_BODIES.split()}
        self._sizes: dict[Any, Size] = {}
        others = {} if other is None else {op.name: op.outputs for op in other[0].get_operations()}
        more = 0 if other is None else other[1] - examples
        for op in self._operations:
            for place, tensor in enumerate(op.outputs):
                size = _num_bytes(tensor)
                if size is None and op.type != "BroadcastGradientArgs":  # which gives short lists of axes
                    self.uncounted.add(op.type)
                second = _num_bytes(others[op.name][place]) if op.name in others else size
                each = 0.0 if size is None or second is None or not more else (second - size) / more
                floats = each if tensor.dtype.name == "float32" else 0.0
                self._sizes[tensor.ref()] = np.array([(size or 0.0) - each * examples, each, floats])

    def total(self, kind: str) -> Size:
        """Return the bytes of all outputs of one type of operation, but for handles of variables."""
        outputs = (t for op in self._operations if op.type == kind for t in op.outputs if t.dtype.name != "resource")
        return sum((self._sizes[tensor.ref()] for tensor in outputs), np.zeros(3))

    def moments(self, *, reduced: bool) -> NDArray[np.float64]:
        """Return the live bytes while each operation runs.

        Args:
            reduced: Whether the gradients of several devices are summed: then no update begins before all gradients are there.

        Returns:
            A row for each operation: bytes that do not depend on the batch, bytes of each example, how many are float32.
        """
        order = _Order(self._operations, self._gradients if reduced else set())
        buffers: dict[Any, _Buffer] = {}
        of_variables: dict[Any, _Buffer] = {}
        live, moments = np.zeros(3), []
        for op in order:
            inputs = [buffers[_origin(tensor)] for tensor in op.inputs]
            if op.type.startswith("Assign"):
                # A variable that is still read gets a new buffer (copy on write). The old one lives on for its readers.
                old = of_variables.pop(op.inputs[0].ref(), None)
                if old is not None and old.users:
                    old.counts, live = True, live + old.size
            outputs = []
            for place, tensor in enumerate(op.outputs):
                buffer = self._buffer(op, place, tensor, inputs, of_variables)
                live = live + (buffer.size if buffer.counts and not buffer.users else 0)
                buffer.users += order.uses[tensor.ref()] + 1  # until the operation has ended
                buffers[tensor.ref()] = buffer
                outputs.append(buffer)
            moments.append(live)
            for buffer in (*inputs, *outputs):
                buffer.users -= 1
                if buffer.users == 0 and buffer.counts:
                    live = live - buffer.size
        return np.array(moments)

    def _buffer(self, op: Any, place: int, tensor: Any, inputs: list[_Buffer], of_variables: dict[Any, _Buffer]) -> _Buffer:
        """Return the buffer of an output: an input's own, one that an input needs no more, or a new one."""
        size = self._sizes[tensor.ref()]
        if op.type == "ReadVariableOp":
            return of_variables.setdefault(op.inputs[0].ref(), _Buffer(size, counts=False))
        if op.type in self._same_buffer:
            return inputs[place]
        if op.type in self._in_place:
            for operand, buffer in zip(op.inputs, inputs, strict=True):
                fits = operand.dtype == tensor.dtype and operand.shape.is_fully_defined() and operand.shape == tensor.shape
                if fits and buffer.counts and buffer.users == 1:
                    return buffer
        return _Buffer(size, counts=op.type not in ("Const", "Placeholder"))


class _Order:
    """Yield operations as TensorFlow's executor starts them in one thread (ExecutorState::ScheduleReady, TensorFlow 2.21).

    What is ready and cheap comes first, in order; of all else the last that became ready.

    Args:
        operations: Of a graph, each after those that it needs.
        gradients: Tensors all of which must be there before what is made of any of them.

    Attributes:
        uses: How many inputs of operations each tensor is.
    """

    def __init__(self, operations: Sequence[Any], gradients: AbstractSet[Any]) -> None:
        self.uses: Counter[Any] = Counter()
        self._waits: dict[str, int] = {}
        self._needed_by: dict[str, list[Any]] = {op.name: [] for op in operations}
        before_gradients = _ancestors({tensor.deref().op for tensor in gradients})
        for op in operations:
            needs = [_origin(tensor) for tensor in op.inputs]
            self.uses.update(needs)
            makers = [tensor.deref().op for tensor in needs] + [dep for dep in op.control_inputs if dep.type != "IdentityN"]
            if op.name not in before_gradients and not gradients.isdisjoint(needs):
                makers += [tensor.deref().op for tensor in gradients]
            self._waits[op.name] = len(makers)
            for maker in makers:
                self._needed_by[maker.name].append(op)
        self._first = deque(op for op in operations if not self._waits[op.name])

    def __iter__(self) -> Iterator[Any]:
        cheap = frozenset(_CHEAP.split())
        first, others = self._first, deque[Any]()
        while first or others:
            op = first.popleft() if first else others.popleft()
            yield op
            last = None
            for following in self._needed_by[op.name]:
                self._waits[following.name] -= 1
                if self._waits[following.name]:
                    continue
                if following.type in cheap:
                    first.append(following)
                else:
                    if last is not None:
                        others.appendleft(last)
                    last = following
            if last is not None:
                (others.appendleft if first else first.append)(last)


def _origin(tensor: Any) -> Any:
    """Return a reference to a tensor. No output of an IdentityN waits for all inputs: Grappler takes it apart."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.ref()


def _ancestors(operations: Iterable[Any]) -> set[str]:
    """Return the names of operations and of all that they need."""
    todo, names = list(operations), set[str]()
    while todo:
        op = todo.pop()
        if op.name not in names:
            names.add(op.name)
            todo += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return names


def _num_bytes(tensor: Any) -> float | None:
    """Return the bytes of a tensor; None where the graph does not know them."""
    count = tensor.shape.num_elements()
    return None if count is None or tensor.dtype.name == "variant" else float(count * tensor.dtype.size)


def highest(moments: NDArray[np.float64]) -> list[list[float]]:
    """Return the moments that may be the peak of some batch: no other one is as high for each batch, in 32 and in 16 bits.

    Args:
        moments: Each with bytes that do not depend on the batch, bytes of each example, and how many of these are float32.

    Returns:
        The same of those moments.
    """
    kept: list[list[float]] = []
    for fixed, each, floats in sorted({tuple(map(float, moment)) for moment in moments}, reverse=True):
        if all(other[1] < each or other[1] - other[2] / 2 < each - floats / 2 for other in kept):
            kept.append([fixed, each, floats])
    return kept[::-1]


Step = tuple[StepFunction, Sequence[Sequence[int]]]
"""A function, and the shapes of its examples."""


def step_memory(steps: Sequence[Step], others: Sequence[Step], state: State) -> dict[str, Any]:
    """Return what functions and variables of a run keep in memory, in bytes.

    Args:
        steps: The functions of the steps.
        others: The same with another batch; nothing where that is not known.
        state: The variables of all steps.

    Returns:
        `weights`, `other_variables`, `static`; `inputs`: what does not depend on the batch, and of each example; `peaks` on one
        device and `reduced_peaks` on several: for the moments that may be the peak of a batch what else lives then (`highest`);
        `scales`: whether other batches are known; `uncounted`: types of operations with tensors of unknown size.
    """
    replays = [_replay_step(step, others[place] if others else None) for place, step in enumerate(steps)]
    sizes = {number: float(np.prod(variable.shape)) * variable.dtype.size for number, variable in state.variables.items()}
    weights = {number for function, _ in steps for number in function.variables.values()}
    peaks, reduced = (np.concatenate([replay.moments(reduced=several) for replay in replays]) for several in (False, True))
    return {
        "weights": sum(size for number, size in sizes.items() if number in weights),
        "other_variables": sum(size for number, size in sizes.items() if number not in weights),
        "static": sum(float(replay.total("Const")[0]) for replay in replays),
        "inputs": [sum(float(replay.total("Placeholder")[part]) for replay in replays) for part in (0, 1)],
        "peaks": highest(peaks),
        "reduced_peaks": highest(reduced),
        "scales": all(replay.scales for replay in replays),
        "uncounted": sorted({kind for replay in replays for kind in replay.uncounted}),
    }


def _replay_step(step: Step, other: Step | None) -> LiveBytes:
    function, shapes = step
    whole, examples = function.graph(shapes, is_whole=True), shapes[0][0]
    if other is None or other[1][0][0] == examples:
        return LiveBytes(whole, examples, None, function.gradient_names)
    graph = other[0].graph(other[1])
    return LiveBytes(whole, examples, (graph, other[1][0][0]), function.gradient_names)


Shapes = Sequence[Sequence[int]]
_CALLING_FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf")
"""Operations that call functions, whose operations are not in the graph. A loop's number of turns is not known besides."""


def count_operations(source: Path, half: Path | None = None) -> dict[str, Any]:
    """Count the operations of the forward and backward pass of a run's first step, and what the whole step keeps in memory.

    Args:
        source: The folder of a run on one device that kept its functions.
        half: The same of a run with half the batch, for a program whose graphs have a fixed batch.

    Returns:
        `flops`, a multiplication and an addition as two; `kernels`, the number of operations with an input; under `uncounted`
        the types of operations that call functions or whose shapes are not known; and `memory` (`step_memory`).
    """
    state, flops, kernels, uncounted = State(source), 0.0, 0, set()
    steps = _steps(source, state)
    for function, shapes in steps:
        graph = function.graph(shapes)
        counted, missing = _of_graph(graph)
        flops += counted
        uncounted |= missing
        kernels += sum(len(operation.inputs) > 0 for operation in graph.get_operations())
    memory = step_memory(steps, _with_another_batch(source, half, steps), state)
    return {"flops": flops, "kernels": kernels, "uncounted": sorted(uncounted), "memory": memory}


def _steps(source: Path, state: State) -> list[Step]:
    """Return the function of each optimizer's first step."""
    trace = Trace(source)
    numbers = {event["optimizer"]: event["function"] for _, event in reversed(trace.of("step"))}
    first = {numbers[name]: next(iter(trace.steps(name)[0].values())) for name in trace.optimizers}
    shapes = {number: [array.shape for array in step.inputs if array is not None] for number, step in first.items()}
    return [(StepFunction(source, number, state), shapes[number]) for number in first]


def _with_another_batch(source: Path, half: Path | None, steps: Sequence[Step]) -> list[Step]:
    if half is not None:
        others = _steps(half, State(half))
        return others if len(others) == len(steps) else []
    if fixed_batches(Trace(source)):
        return []
    return [(function, [[2 * shape[0], *shape[1:]] for shape in shapes]) for function, shapes in steps]


def _of_graph(graph: Any) -> tuple[float, set[str]]:
    flops, uncounted = 0.0, set()
    for operation in graph.get_operations():
        if operation.type in _CALLING_FUNCTIONS:
            uncounted.add(operation.type)
        elif operation.type in _PRODUCTS:
            shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
            try:
                flops += 2.0 * _PRODUCTS[operation.type](operation, [shape.as_list() for shape in shapes])
            except (TypeError, ValueError):  # a dimension or a rank that the graph does not know
                uncounted.add(operation.type)
    return flops, uncounted


def _of_matmul(operation: Any, shapes: Shapes) -> int:
    """Return the size of the result times the length of the sum."""
    name = "transpose_a" if operation.type == "MatMul" else "adj_x"
    return math.prod(shapes[-1]) * shapes[0][-2 if operation.get_attr(name) else -1]


def _of_convolution(operation: Any, shapes: Shapes) -> int:
    """Return the size of the result times that of the filter for one channel of it."""
    return math.prod(shapes[-1]) * math.prod(shapes[1][:-1])


def _of_gradient_of_input(operation: Any, shapes: Shapes) -> int:
    """Return the work of the convolution itself, whose result has the shape of the third input."""
    return math.prod(shapes[2]) * math.prod(shapes[1][:-1])


def _of_gradient_of_filter(operation: Any, shapes: Shapes) -> int:
    return math.prod(shapes[2]) * math.prod(shapes[-1][:-1])


def _of_einsum(operation: Any, shapes: Shapes) -> int:
    """Return the product of the lengths of all indices; an ellipsis counts its dimensions in the first input."""
    sizes: dict[str, int] = {}
    terms = operation.get_attr("equation").decode().partition("->")[0].split(",")
    for term, shape in zip(terms, shapes, strict=False):
        before, dots, after = term.partition("...")
        ends = len(shape) - len(after)
        sizes |= dict(zip(before, shape, strict=False)) | dict(zip(after, shape[ends:], strict=True))
        if dots:
            sizes["..."] = max(sizes.get("...", 1), math.prod(shape[len(before) : ends]))
    return math.prod(sizes.values())


_PRODUCTS: dict[str, Callable[[Any, Shapes], int]] = {
    "MatMul": _of_matmul,
    "BatchMatMul": _of_matmul,
    "BatchMatMulV2": _of_matmul,
    "BatchMatMulV3": _of_matmul,
    "Conv2D": _of_convolution,
    "Conv3D": _of_convolution,
    "Conv2DBackpropInput": _of_gradient_of_input,
    "Conv3DBackpropInputV2": _of_gradient_of_input,
    "Conv2DBackpropFilter": _of_gradient_of_filter,
    "Conv3DBackpropFilterV2": _of_gradient_of_filter,
    # the size of the result times height and width of the filter
    "DepthwiseConv2dNative": lambda _, shapes: math.prod(shapes[-1]) * math.prod(shapes[1][:2]),
    "DepthwiseConv2dNativeBackpropInput": lambda _, shapes: math.prod(shapes[2]) * math.prod(shapes[1][:2]),
    "DepthwiseConv2dNativeBackpropFilter": lambda _, shapes: math.prod(shapes[2]) * math.prod(shapes[-1][:2]),
    "Einsum": _of_einsum,
}
