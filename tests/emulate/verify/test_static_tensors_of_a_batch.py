"""A static tensor as long as the batch looks like rows of it: split it is a bug, and not the design of the strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, Rerun, case_of, codes, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array

DRAWS = np.random.default_rng(1)
WHOLE = DRAWS.normal(size=(3, 1, 32)).astype("f4")
"""What the whole batch gives, step by step."""
PARTS = DRAWS.normal(size=(3, 4, 32)).astype("f4")
"""What each replica's rows give alone: no weighted sum of them is the whole."""
FEATURES = DRAWS.normal(size=(8, 3)).astype("f4")
NEIGHBOURS = np.maximum(np.eye(8), np.roll(np.eye(8), 1, axis=0)).astype("f4")
NORMALIZED = NEIGHBOURS / NEIGHBOURS.sum(axis=1, keepdims=True)
DISTANCES = np.abs(np.subtract.outer(np.arange(8), np.arange(8))).astype("f4")
NEW = DRAWS.normal(size=(3, 8, 2)).astype("f4")
"""Other rows in each step."""
SHUFFLED = np.stack([DRAWS.permutation(8) for _ in range(3)])
"""The same rows in each step, in another order."""
SAME = np.repeat(NEW[:1], 3, axis=0)
"""The same rows in each step, where they were: all of the data."""


def trained(folder: Folder, locals_: Array, inputs: list[Array], loss: float = 1.0) -> Trace:
    """A run with these local gradients (step, replica, element) and these arguments (step, row, ...)."""

    def step(made: Made, k: int) -> None:
        after = np.ones(32, "f4") - np.float32(0.1) * locals_[: k + 1].sum(axis=(0, 1), dtype="f4")
        size = 8 // locals_.shape[1]
        for r, gradient in enumerate(locals_[k]):
            mine = slice(size * r, size * (r + 1))
            rows, parts = [f"{k}-{i}" for i in range(8)][mine], [values[k][mine] for values in inputs]
            made.step(k, {"w": gradient}, {"w": after}, replica=r, rows=rows, inputs=parts, objective=loss / locals_.shape[1])

    return loop(folder.made(f"1x{locals_.shape[1]}"), step, weights=32)


def judged(
    folder: Folder, batch: Array, static: Array, parts: Array = PARTS, *, loss: float = 1.3, allow: str = "nan"
) -> Judgement:
    inputs: list[Any] = [batch, np.stack([static] * 3)]
    topology = trained(folder, parts, inputs, loss)
    again = Rerun(trained(folder, PARTS.sum(axis=1, keepdims=True), inputs, loss), topology)
    case = case_of(trained(folder, WHOLE, inputs), topology, rerun=lambda asked: again if asked == "replicas-summed" else None)
    return judge(case, [allow])


@pytest.mark.parametrize(
    ("batch", "static"),
    [
        pytest.param(NEW, NORMALIZED, id="an adjacency"),
        pytest.param(SAME, NORMALIZED, id="an adjacency of all the data"),
        pytest.param(NEW, DISTANCES, id="distances"),
        pytest.param(SHUFFLED, FEATURES, id="features of the nodes whose numbers are shuffled"),
        pytest.param(NEW, FEATURES, id="a table with as many rows as the batch"),
    ],
)
def test_a_static_tensor_whose_rows_are_not_those_of_the_batch_is_split(folder: Folder, batch: Array, static: Array) -> None:
    found = judged(folder, batch, static)
    assert (found.verdict, codes(found)) == ("divergent", ["static-tensor-split"])
    assert not found.causes[0].by_design
    assert "2, 2, 2 and 2 of its rows" in found.causes[0].evidence
    assert judged(folder, batch, static, allow="in-batch-negatives").verdict == "divergent"


@pytest.mark.parametrize(
    ("batch", "static"),
    [
        pytest.param(SAME, FEATURES, id="all of the data in each step"),
        pytest.param(NEW, np.ones((8, 8), "f4"), id="a mask"),
        pytest.param(NEW, np.tril(np.ones((8, 8), "i4"))[[0, 0, 1, 1, 2, 2, 3, 3]], id="masks of lengths"),
        pytest.param(NEW, np.eye(8, dtype="i4"), id="one class a row"),
        pytest.param(NEW, np.eye(4, dtype="f4")[[0, 0, 1, 1, 2, 2, 3, 3]], id="balanced classes"),
        pytest.param(NEW, np.arange(8), id="labels"),
    ],
)
def test_rows_that_are_alike_in_every_batch_are_no_static_tensor(folder: Folder, batch: Array, static: Array) -> None:
    found = judged(folder, batch, static)
    assert (codes(found), found.causes[0].by_design) == (["in-batch-negatives"], False)
    assert "static" not in found.causes[0].evidence


def test_a_static_tensor_that_each_row_needs_its_own_row_of_is_right(folder: Folder) -> None:
    quarters = np.repeat(WHOLE / 4, 4, axis=1)
    assert judged(folder, SHUFFLED, NORMALIZED, quarters, loss=1.0).verdict == "equivalent"


def test_what_is_allowed_leaves_the_scale_open_as_other_losses_of_parts_do(folder: Folder) -> None:
    found = judged(folder, NEW, NORMALIZED, loss=3.1, allow="static-tensor-split")
    assert found.verdict == "unverified"
    assert any(one.startswith("scale: the replicas' losses add up to 3.1x") for one in found.not_compared)
    assert judged(folder, NEW, NORMALIZED, allow="static-tensor-split").verdict == "equivalent"
