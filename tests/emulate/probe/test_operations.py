from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emulate.evaluate.costs import _PRODUCTS, _of_graph


class Shape(list[Any]):
    def as_list(self) -> list[Any]:
        if not self:
            raise ValueError("unknown rank")
        return list(self)


def operation(kind: str, inputs: list[list[Any]], output: list[Any], **attributes: Any) -> Any:
    tensors = [SimpleNamespace(shape=Shape(shape)) for shape in inputs]
    return SimpleNamespace(
        type=kind, inputs=tensors, outputs=[SimpleNamespace(shape=Shape(output))], get_attr=attributes.__getitem__
    )


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "products"),
    [
        ("MatMul", [[2, 3], [3, 5]], [2, 5], {"transpose_a": False}, 30),
        ("MatMul", [[3, 2], [3, 5]], [2, 5], {"transpose_a": True}, 30),
        ("BatchMatMulV2", [[7, 2, 3], [7, 3, 5]], [7, 2, 5], {"adj_x": False}, 210),
        ("Conv2D", [[2, 8, 8, 3], [3, 3, 3, 4]], [2, 6, 6, 4], {}, 2 * 6 * 6 * 4 * 27),
        ("Conv2DBackpropInput", [[4], [3, 3, 3, 4], [2, 6, 6, 4]], [2, 8, 8, 3], {}, 2 * 6 * 6 * 4 * 27),
        ("Conv2DBackpropFilter", [[2, 8, 8, 3], [4], [2, 6, 6, 4]], [3, 3, 3, 4], {}, 2 * 6 * 6 * 4 * 27),
        ("Conv3D", [[1, 4, 4, 4, 2], [2, 2, 2, 2, 3]], [1, 3, 3, 3, 3], {}, 81 * 16),
        ("DepthwiseConv2dNative", [[1, 8, 8, 3], [3, 3, 3, 1]], [1, 6, 6, 3], {}, 108 * 9),
        ("DepthwiseConv2dNativeBackpropInput", [[4], [3, 3, 3, 1], [1, 6, 6, 3]], [1, 8, 8, 3], {}, 108 * 9),
        ("DepthwiseConv2dNativeBackpropFilter", [[1, 8, 8, 3], [4], [1, 6, 6, 3]], [3, 3, 3, 1], {}, 108 * 9),
        ("Einsum", [[2, 3, 4], [4, 5]], [2, 3, 5], {"equation": b"abc,cd->abd"}, 120),
        ("Einsum", [[2, 3, 4], [4, 5]], [2, 3, 5], {"equation": b"...c,cd->...d"}, 120),
    ],
)
def test_a_product_counts_each_multiplication_and_addition(
    kind: str, inputs: list[list[Any]], output: list[Any], attributes: dict[str, Any], products: int
) -> None:
    graph = SimpleNamespace(get_operations=lambda: [operation(kind, inputs, output, **attributes)])
    assert _of_graph(graph) == (2 * products, set())
    assert kind in _PRODUCTS


def test_what_cannot_be_counted_is_named() -> None:
    operations = [operation("While", [], []), operation("MatMul", [[None, 3], [3, 5]], [None, 5], transpose_a=False)]
    operations += [operation("Conv2D", [[], [3, 3, 3, 4]], []), operation("Relu", [[2]], [2])]
    assert _of_graph(SimpleNamespace(get_operations=lambda: operations)) == (0.0, {"While", "MatMul", "Conv2D"})
