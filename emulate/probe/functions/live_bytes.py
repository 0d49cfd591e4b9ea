"""Find the peak of live bytes of a step: replay its graph in the order of TensorFlow's executor."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
_WITH_FUNCTIONS = "Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While"
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
        self.uncounted = {op.type for op in self._operations if op.type in _WITH_FUNCTIONS.split()}
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
