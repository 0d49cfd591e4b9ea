"""Find the peak of live bytes of a step: replay its graph in the order of TensorFlow's executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = NDArray[np.float64]
"""Bytes of a buffer: what does not depend on the batch; of each example; of it what is float32."""

_SAME_BUFFER = """
CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape Snapshot Squeeze StopGradient
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
"""Operations that the executor runs before all others: their kernels return false in IsExpensive()."""
_WITH_FUNCTIONS = "Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While"
"""Operations that call functions, whose tensors are not in the graph."""


@dataclass(eq=False)
class _Buffer:
    """Hold how many operations still need a buffer, and whether it counts: those of variables and constants do not."""

    size: Size
    counts: bool = True
    users: int = 0


def _size(tensor: Any, larger: Any, examples: int) -> Size | None:
    """Return the bytes of a tensor; None where the graph does not know them.

    Args:
        tensor: In the graph of a batch with so many examples.
        larger: The same in the graph of a batch with twice as many; None where it does not depend on the batch.
        examples: How many.
    """
    one, two = _bytes(tensor), _bytes(tensor if larger is None else larger)
    if one is None or two is None:
        return None
    each = (two - one) / examples
    return np.array([one - each * examples, each, each if tensor.dtype.name == "float32" else 0.0])


def _bytes(tensor: Any) -> float | None:
    count = tensor.shape.num_elements()
    return None if count is None or tensor.dtype.name == "variant" else float(count * tensor.dtype.size)


class LiveBytes:
    """Replay one step.

    Args:
        graph: Of the whole step.
        larger: Of its forward and backward pass with twice as many examples; None where that cannot be made.
        examples: In the step.

    Attributes:
        scales: Whether sizes for other batches are known.
        uncounted: Types of operations some of whose buffers are not counted, as nobody knows their size.
    """

    def __init__(self, graph: Any, larger: Any | None, examples: int) -> None:
        self._same_buffer, self._in_place = frozenset(_SAME_BUFFER.split()), frozenset(_IN_PLACE.split())
        self._operations = graph.get_operations()
        twice = {} if larger is None else {op.name: op.outputs for op in larger.get_operations()}
        self.scales = larger is not None
        self.uncounted = {op.type for op in self._operations if op.type in _WITH_FUNCTIONS.split()}
        self._sizes = {}
        for op in self._operations:
            for place, tensor in enumerate(op.outputs):
                size = _size(tensor, twice[op.name][place] if op.name in twice else None, examples)
                if size is None:
                    self.uncounted.add(op.type)
                self._sizes[tensor.ref()] = np.zeros(3) if size is None else size

    def total(self, kind: str) -> Size:
        """Return the bytes of all outputs of one type of operation, but for handles of variables."""
        found = (one for op in self._operations if op.type == kind for one in op.outputs if one.dtype.name != "resource")
        return np.sum([np.zeros(3), *(self._sizes[tensor.ref()] for tensor in found)], axis=0)

    def peaks(self) -> NDArray[np.float64]:
        """Return the live bytes at each moment that some batch has its peak at, one line each."""
        buffers: dict[Any, _Buffer] = {}
        of_variables: dict[Any, _Buffer] = {}
        live, found = np.zeros(3), []
        for op in in_order(self._operations):
            inputs = [buffers[tensor.ref()] for tensor in op.inputs]
            if op.type.startswith("Assign") and of_variables.get(key := op.inputs[0].ref()) is not None:
                # A variable that is still read gets a new buffer (copy on write); the old one lives on for the readers.
                old = of_variables.pop(key)
                if old.users:
                    old.counts = True
                    live = live + old.size
            for place, tensor in enumerate(op.outputs):
                buffer = self._buffer(op, place, tensor, inputs, of_variables)
                if tensor.ref() not in buffers and buffer.counts and buffer.users == 0:
                    live = live + buffer.size
                buffer.users += len(tensor.consumers()) + 1  # until the operation has ended
                buffers[tensor.ref()] = buffer
            found.append(live)
            for buffer in (*inputs, *(buffers[tensor.ref()] for tensor in op.outputs)):
                buffer.users -= 1
                if buffer.users == 0 and buffer.counts:
                    live = live - buffer.size
        return np.array(found)

    def _buffer(self, op: Any, place: int, tensor: Any, inputs: list[_Buffer], of_variables: dict[Any, _Buffer]) -> _Buffer:
        """Return the buffer of an output: an input's own, one that an input needs no more, or a new one."""
        size = self._sizes[tensor.ref()]
        if op.type == "ReadVariableOp":
            return of_variables.setdefault(op.inputs[0].ref(), _Buffer(size, counts=False))
        if op.type in self._same_buffer:
            return inputs[place]
        if op.type in self._in_place:
            for given, buffer in zip(op.inputs, inputs, strict=True):
                fits = given.dtype == tensor.dtype and given.shape.is_fully_defined() and given.shape == tensor.shape
                if fits and buffer.counts and buffer.users == 1:
                    return buffer
        return _Buffer(size, counts=op.type not in ("Const", "Placeholder"))


def in_order(operations: list[Any]) -> Iterator[Any]:
    """Yield operations as TensorFlow's executor starts them in one thread (`ExecutorState::ScheduleReady`, TensorFlow 2.21).

    What is ready and cheap comes first, in order; of all else the last that became ready.
    """
    needed_by: dict[str, list[Any]] = {op.name: [] for op in operations}
    waits: dict[str, int] = {}
    for op in operations:
        waits[op.name] = len(op.inputs) + len(op.control_inputs)
        for tensor in op.inputs:
            needed_by[tensor.op.name].append(op)
    for op in operations:
        for before in op.control_inputs:
            needed_by[before.name].append(op)
    cheap = frozenset(_CHEAP.split())
    first, others = deque(op for op in operations if not waits[op.name]), deque[Any]()
    while first or others:
        op = first.popleft() if first else others.popleft()
        yield op
        last = None
        for following in needed_by[op.name]:
            waits[following.name] -= 1
            if waits[following.name]:
                continue
            if following.type in cheap:
                first.append(following)
            else:
                if last is not None:
                    others.appendleft(last)
                last = following
        if last is not None:
            (others.appendleft if first else first.append)(last)


def highest(lines: NDArray[np.float64]) -> list[list[float]]:
    """Return those of the lines `fixed + batch * each` that are the highest for some batch > 0, by increasing slope."""
    hull: list[tuple[float, float]] = []
    for fixed, each in sorted({(float(fixed), float(each)) for fixed, each in lines}, key=lambda line: (line[1], line[0])):
        if hull and hull[-1][1] == each:
            hull.pop()
        while hull and (fixed >= hull[-1][0] or (len(hull) > 1 and _is_below(hull[-2], hull[-1], (fixed, each)))):
            hull.pop()
        hull.append((fixed, each))
    return [list(line) for line in hull]


def _is_below(first: Any, middle: Any, last: Any) -> bool:
    """Return whether a line is nowhere the highest of three with increasing slopes."""
    return bool((last[0] - first[0]) * (first[1] - middle[1]) >= (middle[0] - first[0]) * (first[1] - last[1]))
