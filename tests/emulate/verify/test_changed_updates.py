"""Clipping and sparse gradients are named for what they explain of an update, and a learning rate for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Adam, Problem, Sgd

GRADIENTS = np.random.default_rng(8).normal(size=(4, 4, 16, 8)).astype("f4")
"""Local gradients of a table: step, replica, row, column."""
ROWS = [f"row-{k}" for k in range(64)]


def _table(folder: Folder, replicas: int, update: Callable[[Any, int], Any], looked_up: Any = 1) -> Trace:
    """A table that an optimizer of its own trains with sparse gradients, and a dense variable beside it.

    Args:
        folder: Where the trace is made.
        replicas: How many there are.
        update: What is taken from the table: of each part the gradient, and the number of replicas.
        looked_up: By part and row, 0 where no example of the part looks up the row.
    """
    parts = (GRADIENTS * np.reshape(looked_up, (1, *np.shape(looked_up), *[1] * (3 - np.ndim(looked_up))))).astype("f4")

    def step(made: Made, k: int) -> None:
        local = parts.reshape(4, replicas, -1, 16, 8).sum(axis=2)
        table = np.ones((16, 8), "f4") - sum(update(of_step, replicas) for of_step in local[: k + 1])
        dense = np.ones(16, "f4") - np.float32(0.1) * GRADIENTS[: k + 1, ..., 0].sum(axis=(0, 1))
        for r in range(replicas):
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            about = {"replica": r, "rows": rows, "objective": 1 / replicas}
            own = GRADIENTS[k].reshape(replicas, -1, 16, 8).sum(axis=1)[r, :, 0]
            made.step(k, {"table": local[k, r]}, {"table": table.astype("f4")}, sparse=True, optimizer="of_table", **about)
            made.step(k, {"w": own}, {"w": dense}, **about)

    made = folder.made(f"1x{replicas}")
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": replicas, "local": replicas})
    for r in range(replicas):
        made.initial({"table": np.ones((16, 8), "f4"), "w": np.ones(16, "f4")}, replica=r)
    for k in range(4):
        step(made, k)
    return made.trace()


def _judged(folder: Folder, update: Callable[[Any, int], Any], looked_up: Any = 1) -> Judgement:
    return judge(case_of(_table(folder, 1, update, looked_up), _table(folder, 4, update, looked_up)))


def _signs(parts: Any, replicas: int) -> Any:
    """As an optimizer that divides by the root of squares: those of each replica's row, not of the sum."""
    return np.float32(0.1) * parts.sum(axis=0) / (1 + np.sqrt((parts**2).sum(axis=0)))


def test_a_learning_rate_of_a_table_alone_is_not_taken_for_a_sparse_gradient(folder: Folder) -> None:
    found = _judged(folder, lambda parts, n: np.float32(0.1 * n) * parts.sum(axis=0))
    assert codes(found) == ["update-scaling"]
    assert "update of one device = 4.0000" in found.causes[0].evidence


def test_rows_that_an_optimizer_takes_once_for_each_replica_are_a_sparse_gradient(folder: Folder) -> None:
    assert codes(_judged(folder, _signs)) == ["sparse-gradient"]
    shared = np.array([[row < 4 or row // 4 == part for row in range(16)] for part in range(4)])
    found = _judged(folder, _signs, shared)
    assert codes(found) == ["sparse-gradient"]


def test_rows_that_one_replica_alone_looks_up_differ_for_another_reason(folder: Folder) -> None:
    shared = np.array([[row < 4 or row // 4 == part for row in range(16)] for part in range(4)])

    def update(parts: Any, n: int) -> Any:
        return _signs(parts, n) * np.where(np.arange(16) == 9, n, 1).astype("f4")[:, None]

    assert codes(_judged(folder, update, shared)) == ["unexplained"]


def test_an_update_in_proportion_to_a_sparse_gradient_is_none_of_its_rows(folder: Folder) -> None:
    def update(parts: Any, n: int) -> Any:
        return np.float32(0.1) * parts.sum(axis=0) * (1 + (n > 1) * np.arange(8, dtype="f4"))

    assert codes(_judged(folder, update)) == ["unexplained"]


FACTS = {"optimizers": {"sgd": {"class": "SGD", "global_clipnorm": 0.5}}}


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_a_learning_rate_beside_clipping_is_found_with_clipping_switched_off(folder: Folder, optimizer: Any) -> None:
    right = Problem(clip=0.5, steps=4, optimizer=optimizer)
    rate = optimizer().rate
    wrong = Problem(clip=0.5, clip_first=True, steps=4, optimizer=lambda: optimizer(4 * rate))
    unclipped = Problem(steps=4, optimizer=optimizer), Problem(steps=4, optimizer=lambda: optimizer(4 * rate))
    found = judge(folder.case(right, wrong, facts=FACTS, switches={"no-clipping": unclipped}))
    assert codes(found) == ["clip-before-reduce", "update-scaling"]
    assert "update of one device = 4.0000" in found.causes[1].evidence


def test_a_learning_rate_beside_clipping_is_left_where_clipping_cannot_be_switched_off(folder: Folder) -> None:
    right, wrong = Problem(clip=0.5, steps=4), Problem(clip=0.5, clip_first=True, steps=4, optimizer=lambda: Sgd(0.4))
    assert codes(judge(folder.case(right, wrong, facts=FACTS))) == ["clip-before-reduce", "unexplained"]


def test_clipping_that_the_numbers_explain_takes_no_further_run(folder: Folder) -> None:
    case = folder.case(Problem(clip=0.5, steps=4), Problem(clip=0.5, clip_first=True, steps=4), facts=FACTS)
    assert codes(judge(case)) == ["clip-before-reduce"]
    assert ("no-clipping",) not in case.lab.asked  # type: ignore[attr-defined]
