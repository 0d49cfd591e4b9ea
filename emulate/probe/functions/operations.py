"""Count the floating-point operations of a recorded step: those of products and convolutions, which decide its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emulate.probe.functions.files import fixed_batches
from emulate.probe.functions.memory import Step, step_memory
from emulate.probe.functions.state import State
from emulate.probe.functions.step_function import StepFunction
from emulate.probe.trace import Trace

Shapes = Sequence[Sequence[int]]
_WITH_FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf")
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
        if operation.type in _WITH_FUNCTIONS:
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


def _of_depthwise(operation: Any, shapes: Shapes) -> int:
    """Return the size of the result times height and width of the filter."""
    return math.prod(shapes[-1]) * math.prod(shapes[1][:2])


def _of_gradient_of_depthwise_input(operation: Any, shapes: Shapes) -> int:
    return math.prod(shapes[2]) * math.prod(shapes[1][:2])


def _of_gradient_of_depthwise_filter(operation: Any, shapes: Shapes) -> int:
    return math.prod(shapes[2]) * math.prod(shapes[-1][:2])


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
    "DepthwiseConv2dNative": _of_depthwise,
    "DepthwiseConv2dNativeBackpropInput": _of_gradient_of_depthwise_input,
    "DepthwiseConv2dNativeBackpropFilter": _of_gradient_of_depthwise_filter,
    "Einsum": _of_einsum,
}
