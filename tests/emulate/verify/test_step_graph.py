"""Two graphs of a step are the same but for what a replica has of its own; else the lines that differ are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emulate.verify.lines import step_graph
from emulate.verify.verdict import StepGraph

MATMUL, SQUARE, SUM = ["MatMul", "a", [[0], [1]]], ["Square", "b", [[0, 0]]], ["Sum", "c", [[1, 0], [2]]]
LINES = [{"file": "train.py", "line": line, "text": ""} for line in (10, 11, 12, 13)]


def graph(*replicas: int, divisor: Any = 8.0, rows: int = 8, operations: Any = None, function: str = "step") -> dict[str, Any]:
    """A loss in lines 10 to 13, and its gradient in line 13: of a product, squared, summed and divided by a constant."""
    constant = divisor if isinstance(divisor, (str, list)) else [divisor]
    made = operations or [MATMUL, SQUARE, SUM, ["RealDiv", "d", [[2, 0], [3]]], ["RealDiv", "d", [[2, 0], [3]]]]
    return {
        "event": "graph", "function": function, "replicas": list(replicas), "rows": [rows], "operations": made,
        "leaves": [["float32", None], ["resource", None], ["int32", [0, 1]], ["float32", constant]],
        "forward": len(made) - 1, "lines": LINES, "at": [min(place, 3) for place in range(len(made))],
    }  # fmt: skip


def trace(*events: dict[str, Any], is_virtual: bool = False) -> Any:
    return SimpleNamespace(
        of=lambda kind: [(0, event) for event in events if event["event"] == kind],
        topology=SimpleNamespace(is_virtual=is_virtual),
    )


def told(reference: dict[str, Any], *events: dict[str, Any], number: int = 2, **options: Any) -> StepGraph:
    found = step_graph(trace(reference), trace(*events, **options), number)
    assert found is not None
    return found


SAME = "The step does not depend on the number of replicas"
EXCEPT = "The graph of the step is the same on one device and on 2 replicas, except in"
EVERYWHERE = f"{SAME}: its graph is the same on one device and on each of 2 replicas"


def test_equal_graphs_do_not_depend_on_the_number_of_replicas() -> None:
    found = told(graph(0), graph(0, 1))
    assert (found.text, found.same_on_replicas, found.depends_on_number) == (f"{EVERYWHERE}.", True, False)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (4.0, 8.0, f"{EVERYWHERE}, apart from the number of examples."),  # of 4 and of 8 examples
        ([24, 48], [48, 48], f"{EVERYWHERE}, apart from the number of examples."),  # of 24 and of 48 examples
        ([0.0] * 4, [0.0], f"{EVERYWHERE}, apart from the number of examples."),
        (40, 80, f"{EVERYWHERE}, apart from the number of examples."),
        (0.5, 1.0, f"{EXCEPT} train.py:13 (RealDiv: 0.5 on 2 replicas, 1 on one device)."),
        (2.0, 1.0, f"{EXCEPT} train.py:13 (RealDiv: 2 on 2 replicas, 1 on one device)."),
        (8.0, "inf", f"{EXCEPT} train.py:13 (RealDiv)."),
        ("digest", "another", f"{EXCEPT} train.py:13 (RealDiv)."),
    ],
)
def test_a_constant_may_depend_on_the_number_of_examples_alone(ours: Any, theirs: Any, text: str) -> None:
    rows = 24 if ours == [24, 48] else 4
    assert told(graph(0, divisor=theirs, rows=2 * rows), graph(0, 1, divisor=ours, rows=rows)).text == text


def test_a_constant_may_be_the_number_of_the_replica() -> None:
    of_each = [graph(0, divisor=0), graph(1, divisor=1)]
    assert told(graph(0, divisor=0), *of_each).text == f"{EVERYWHERE}, apart from the number of the replica in train.py:13."
    virtual = told(graph(0, divisor=0), graph(0, divisor="number"), is_virtual=True)
    assert [location.line for location in virtual.locations] == [13]
    assert "not the same on all replicas" in told(graph(0), graph(0, divisor=0), graph(1, divisor=2)).text


def test_an_operation_that_one_graph_has_alone_is_named_with_its_line() -> None:
    *forward, backward = graph(0)["operations"]
    scaled = [*forward, ["Mul", "e", [[3, 0], [3]]], backward]
    found = told(graph(0), graph(0, 1, operations=scaled))
    assert found.text == f"{EXCEPT} train.py:13 (Mul only on 2 replicas)."
    other = told(graph(0), graph(0), graph(1, operations=scaled))
    assert other.text == (
        "The step is not the same on all replicas: replica 1 differs from replica 0 in train.py:13 (Mul only on replica 1)."
    )
    assert (other.same_on_replicas, other.depends_on_number) == (False, None)


def test_the_same_operations_in_another_arrangement_are_another_graph() -> None:
    swapped = [["MatMul", "a", [[1], [0]]], *graph(0)["operations"][1:]]
    assert told(graph(0), graph(0, 1, operations=swapped)).depends_on_number


def test_the_same_tensor_must_be_taken_in_both_graphs() -> None:
    twice, another = ([["MatMul", "a", [[0], [1]]], ["MatMul", "a", [[0], [leaf]]]] for leaf in (1, 4))
    leaves = [*graph(0)["leaves"], ["resource", None]]
    alone, replica = ({**graph(number, operations=made), "leaves": leaves} for number, made in ((0, another), (0, twice)))
    found = told(alone, replica | {"replicas": [0, 1]})
    assert found.text == f"{EXCEPT} train.py:11 (MatMul)."


def test_another_order_of_equal_operations_is_no_difference() -> None:
    product, exponential, total = ["Mul", "m", [[0], [0]]], ["Exp", "e", [[0]]], ["Sum", "c", [[2, 0], [2]]]
    alone = graph(0, operations=[product, exponential, ["AddV2", "f", [[0, 0], [1, 0]]], total])
    replicas = graph(0, 1, operations=[exponential, product, ["AddV2", "f", [[1, 0], [0, 0]]], total])
    assert told(alone, replicas | {"at": [1, 0, 2, 3]}).text == f"{EVERYWHERE}."


def test_a_sum_over_the_replicas_inside_of_the_step_is_told_and_not_compared() -> None:
    summed = [MATMUL, SQUARE, SUM, ["RealDiv", "d", [[4], [3]]], ["RealDiv", "d", [[4], [3]]]]
    replica = graph(0, 1, operations=summed)
    replica["leaves"].append(["float32", None])
    assert told(graph(0), replica).text == f"{EVERYWHERE}, apart from a sum over the replicas in train.py:13."


@pytest.mark.parametrize(
    "events",
    [[], [graph(0)], [graph(0, 1), graph(0, 1, function="other")]],
    ids=["in eager code", "of one replica only", "of a function that one device does not run"],
)
def test_nothing_is_said_of_graphs_that_are_not_known(events: list[dict[str, Any]]) -> None:
    assert step_graph(trace(graph(0)), trace(*events), 2) is None
