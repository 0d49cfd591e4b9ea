"""What operations do between two points of a step, told by types and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from emulate.recorder.lines import walks
from emulate.recorder.lines.stack_lines import Operation, Value


@dataclass(frozen=True)
class Shape:
    dims: Sequence[int | None]

    @property
    def rank(self) -> int:
        return len(self.dims)

    def as_list(self) -> list[int | None]:
        return list(self.dims)


@dataclass(frozen=True)
class Dtype:
    name: str = "float32"

    @property
    def is_floating(self) -> bool:
        return self.name.startswith("float")


def made(kind: str, *inputs: Value, shape: Sequence[int | None] = (), dtype: str = "float32", replica: int = 0) -> Value:
    """The result of an operation."""
    operation = Operation(kind, replica, (), inputs)
    operation.outputs.append(Value(operation, 0, Shape(shape), Dtype(dtype)))
    return operation.outputs[0]


class Loss:
    """A small step: rows, a model's results for each of them, and numbers."""

    def __init__(self) -> None:
        self.rows = made("Given", shape=[None, 4])
        self.weight = made("ReadVariableOp", made("Given", dtype="resource"), shape=[4, 3])
        self.logits = made("MatMul", self.rows, self.weight, shape=[None, 3])
        self.each = made("Sum", made("Square", self.logits, shape=[None, 3]), made("Const", shape=[1]), shape=[None])
        self.number = made("Const")

    def flows(self, *ends: Value) -> walks.Flows:
        return walks.Flows(walks.region(ends), {walks.key_of(self.rows)})

    def roles(self, end: Value) -> set[str]:
        return walks.roles(end.op, self.flows(end))


def test_a_region_ends_at_the_tensors_that_stop_it_and_tells_distances() -> None:
    loss = Loss()
    mean = made("Mean", loss.each)
    found = walks.region([mean], {walks.key_of(loss.logits)})
    assert {operation.type: distance for operation, distance in found.items()} == {
        "Mean": 0, "Sum": 1, "Square": 2, "Const": 2,
    }  # fmt: skip


def test_a_mean_over_examples_is_told_from_a_mean_of_each() -> None:
    loss = Loss()
    assert loss.roles(made("Mean", loss.each, made("Const", shape=[1]))) == {"mean"}
    assert loss.roles(made("Mean", loss.logits, made("Const", shape=[1]), shape=[None])) == set()


def test_a_range_over_what_a_tensor_has_numbers_it_and_one_over_constants_does_not() -> None:
    loss = Loss()
    size = made("StridedSlice", made("Shape", loss.rows, shape=[2]))
    assert loss.roles(made("Range", loss.number, size, loss.number, shape=[None])) == {"numbers"}
    assert loss.roles(made("Range", loss.number, loss.number, loss.number, shape=[2])) == set()


def test_a_product_of_what_examples_are_reduced_to_is_no_sum_over_them() -> None:
    loss = Loss()
    fraction, importance = (made("Mean", loss.logits, loss.number, shape=[3]) for _ in range(2))
    assert loss.roles(made("Mul", fraction, importance, shape=[3])) == {"ratio"}
    assert loss.roles(made("Mul", fraction, loss.number, shape=[3])) == {"scale"}


@pytest.mark.parametrize(
    ("cut", "moves"),
    [
        (lambda x: x[:, None], False),
        (lambda x: x[:, :, 1:2], False),
        (lambda x: x[1:], True),
        (lambda x: x[::-1], True),
        (lambda x: x[0], True),
        (lambda x: x[None], True),
    ],
)
def test_a_slice_moves_examples_unless_it_takes_all_of_them_in_their_order(cut: Callable[[Any], Any], moves: bool) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        rows = tf.compat.v1.placeholder(tf.float32, [None, 4, 3])
        end = cut(rows)
    flows = walks.Flows(walks.region([end]), {walks.key_of(rows)})
    assert ("moves" in walks.roles(end.op, flows)) == moves


def test_a_division_by_a_number_scales_and_one_by_a_count_is_a_ratio() -> None:
    loss = Loss()
    total = made("Sum", loss.each, made("Const", shape=[1]))
    count = made("Sum", made("Cast", loss.rows, shape=[None, 4]), made("Const", shape=[2]))
    ratio = made("RealDiv", total, made("Maximum", count, loss.number))
    assert loss.roles(made("RealDiv", total, loss.number)) == {"scale"}
    assert loss.roles(ratio) == {"ratio"}
    assert walks.counts(walks.region([ratio]), loss.flows(ratio)) == {count.op}


def test_rows_of_a_table_that_examples_look_up_are_told_from_those_that_all_of_them_share() -> None:
    loss, table = Loss(), made("Given", dtype="resource")
    ids, positions = made("Cast", loss.rows, shape=[None, 4], dtype="int64"), made("Range", shape=[4], dtype="int64")
    assert loss.roles(made("ResourceGather", table, ids, shape=[None, 4, 8])) == {"looks-up"}
    assert loss.roles(made("ResourceGather", table, positions, shape=[4, 8])) == {"looks-up-the-same"}
    assert loss.roles(made("GatherV2", loss.weight, positions, loss.number, shape=[4, 3])) == {"looks-up-the-same"}
    assert "looks-up" not in loss.roles(made("GatherV2", loss.rows, ids, loss.number, shape=[None, 4]))


def test_a_term_of_the_weights_alone_is_a_penalty() -> None:
    loss = Loss()
    total = made("Sum", loss.each, made("Const", shape=[1]))
    assert loss.roles(made("AddV2", total, made("L2Loss", loss.weight))) == {"penalty"}
    assert loss.roles(made("AddV2", total, loss.number)) == set()


def test_a_dense_layer_on_positions_of_each_example_mixes_none_and_a_sum_over_examples_contracts() -> None:
    x, weight = made("Given", shape=[6, 5, 4]), made("ReadVariableOp", made("Given", dtype="resource"), shape=[4, 8])
    positions = made("MatMul", made("Reshape", x, shape=[30, 4]), weight, shape=[30, 8])
    errors = made("Sub", made("Reshape", positions, shape=[6, 5, 8]), x, shape=[6, 5, 8])
    turned = made("Reshape", made("Transpose", x, shape=[5, 4, 6]), shape=[20, 6])
    summed = made("MatMul", turned, made("Reshape", x, shape=[6, 20]), shape=[20, 20])
    for end, expected in ((errors, set()), (summed, {"contracts"})):
        flows = walks.Flows(walks.region([end]), {walks.key_of(x)}, [6])
        assert walks.roles(end.op, flows) == expected


def test_examples_that_meet_each_other_mix() -> None:
    loss = Loss()
    center = made("Mean", loss.logits, made("Const", shape=[1]), shape=[3])
    assert loss.roles(made("Sub", loss.logits, center, shape=[None, 3])) == {"mixes"}
    turned = made("Transpose", loss.logits, made("Const", shape=[2]), shape=[3, None])
    assert loss.roles(made("MatMul", loss.logits, turned, shape=[None, None])) == {"mixes"}
    of_data = made("Mean", loss.rows, made("Const", shape=[1]), shape=[4])
    assert loss.roles(made("Sub", loss.rows, of_data, shape=[None, 4])) == {"mixes-data"}
    bias = made("ReadVariableOp", made("Given", dtype="resource"), shape=[3])
    assert "mixes" not in loss.roles(made("AddV2", loss.logits, bias, shape=[None, 3]))


def test_a_replica_that_takes_a_tensor_of_anothers_examples_crosses() -> None:
    rows = {replica: made("Given", shape=[None, 4], replica=replica) for replica in (0, 1)}
    made_of = {replica: made("Relu", one, shape=[None, 4], replica=replica) for replica, one in rows.items()}
    constant = made("Const", replica=0)
    right = made("Mul", made_of[1], constant, shape=[None, 4], replica=1)
    wrong = made("AddV2", right, made_of[0], shape=[None, 4], replica=1)
    summed = made("AddN", made_of[0], made_of[1], shape=[None, 4])
    summed.op.replica = None  # a collective belongs to no replica
    after = made("Mul", summed, constant, shape=[None, 4], replica=1)
    keys = {replica: {walks.key_of(one)} for replica, one in rows.items()}
    found = walks.crossings([one.op for one in (right, wrong, summed, after)], lambda one: one.replica, keys)
    assert list(found) == [(wrong.op, made_of[0])]
