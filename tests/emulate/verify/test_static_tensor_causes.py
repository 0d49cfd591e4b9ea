"""Static tensors: split over the replicas is a divergence; in the graph, and random stages before a cache, are advice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem

TABLE = np.arange(40.0).reshape(10, 4)
CONSTANT = {"shape": [1797, 1797], "dtype": "float32", "where": "train.py:9", "bytes": 12916836, "copies": 1}


def run(folder: Folder, replicas: int, parts: list[Any], *, batches_differ: bool = True) -> Any:
    """A loop whose step has a batch and one part of a table for each replica, and whose gradient depends on that part."""

    def step(made: Made, k: int) -> None:
        for replica, part in enumerate(parts):
            weights, batch = {"w": np.full(128, float(k))}, np.full((8 // replicas, 2), float(k if batches_differ else 0))
            event = {
                "event": "step",
                "optimizer": "sgd",
                "step": k,
                "replica": replica,
                "rows": [f"{k}-{replica}-{i}" for i in range(8 // replicas)]
                if replicas > 1
                else [f"{k}-{r}-{i}" for r in (0, 1) for i in range(4)],
                "inputs": [made.writer().array(batch), made.writer().array(part)],
                "gradients": {"w": made.writer().array(np.full(128, part.std() / replicas))},
                "weights": made.variables(0, weights, (), True),
                "objective": 1.0 / replicas,
                "draws": [],
            }
            made.event(event)

    return loop(folder.made(f"1x{replicas}"), step)


def judged(folder: Folder, parts: list[Any], *, table: Any = TABLE, **options: Any) -> Any:
    return judge(case_of(run(folder, 1, [table], **options), run(folder, 2, parts, **options)))


def test_a_table_whose_parts_are_on_the_replicas_is_split(folder: Folder) -> None:
    found = judged(folder, [TABLE[:5], TABLE[5:]])
    assert (found.verdict, [cause.code for cause in found.causes]) == ("divergent", ["static-tensor-split"])
    assert "10 rows" in found.causes[0].summary
    assert "5 and 5 of its rows" in found.causes[0].evidence


def test_a_table_that_every_replica_has_is_not_split(folder: Folder) -> None:
    assert "static-tensor-split" not in [cause.code for cause in judged(folder, [TABLE, TABLE]).causes]


def test_a_part_of_a_tensor_whose_rows_are_all_equal_is_as_good_as_all_of_it(folder: Folder) -> None:
    same = np.repeat(TABLE[:1], 10, axis=0)
    found = judge(case_of(run(folder, 1, [same]), run(folder, 2, [same[:5], same[5:]])))
    assert (found.verdict, found.causes) == ("equivalent", ())


def test_an_argument_with_several_numbers_for_each_example_may_be_split_where_all_agrees(folder: Folder) -> None:
    positions = np.tile(np.arange(4.0), 8)  # the same in each step, which reshapes it to a row for each example
    found = judged(folder, [positions[:16], positions[16:]], table=positions)
    assert (found.verdict, found.causes, found.not_compared) == ("equivalent", (), ())


OFTEN = np.tile(np.arange(4.0), 8)
"""Four numbers for each example, the same four."""
SELDOM = np.random.default_rng(0).normal(size=32)
"""Four numbers for each example, others for each."""


@pytest.mark.parametrize(
    ("numbers", "factor", "wrong"),
    [
        pytest.param(OFTEN, 4.0, ["loss-scaling"], id="positions, and a loss that is too large"),
        pytest.param(SELDOM, 4.0, ["loss-scaling"], id="other numbers, and a loss that is too large"),
        pytest.param(OFTEN, None, ["unexplained"], id="positions, and what nothing explains"),
        pytest.param(SELDOM, None, ["static-tensor-split"], id="a table, which explains what nothing else does"),
        pytest.param(SELDOM, 1.0, ["update-scaling"], id="other numbers, and an update that is too large"),
    ],
)
def test_several_numbers_for_each_example_are_a_split_tensor_only_where_gradients_need_all_of_them(
    folder: Folder, numbers: Any, factor: float | None, wrong: list[str]
) -> None:
    gradients = np.random.default_rng(1).normal(size=(3, 4, 128)).astype("f4")

    def trained(replicas: int) -> Any:
        def step(made: Made, k: int) -> None:
            local = gradients[k].reshape(replicas, -1, 128).sum(axis=1)
            if replicas > 1:
                local = local * np.float32(factor) if factor is not None else local**2
            rate = 0.2 if replicas > 1 and factor == 1 else 0.1
            for replica, gradient in enumerate(local):
                own = slice(8 // replicas * replica, 8 // replicas * (replica + 1))
                rows, batch = [f"{k}-{i}" for i in range(8)][own], np.arange(8.0 * k, 8.0 * k + 8)[own]
                inputs = [batch, numbers.reshape(8, 4)[own].reshape(-1)]
                weights = {"w": np.full(128, 1 - rate * (k + 1), "f4")}
                made.step(k, {"w": gradient}, weights, replica=replica, rows=rows, inputs=inputs, objective=1 / replicas)

        return loop(folder.made(f"1x{replicas}"), step)

    assert codes(judge(case_of(trained(1), trained(4)))) == wrong


def test_a_program_whose_only_batch_is_all_of_its_data_has_no_static_tensor(folder: Folder) -> None:
    found = judged(folder, [TABLE[:5], TABLE[5:]], batches_differ=False)
    assert "static-tensor-split" not in [cause.code for cause in found.causes]


@pytest.mark.parametrize(
    ("facts", "code", "evidence"),
    [
        ({"constants": [CONSTANT]}, "static-tensor-in-graph", "float32[1797, 1797] was written into a graph 1 time."),
        ({"cached": ["shuffle", "map(augment)"]}, "cached-randomness", "shuffle, map(augment)"),
    ],
)
def test_what_only_costs_is_told_and_does_not_decide(folder: Folder, facts: Any, code: str, evidence: str) -> None:
    right = Problem(steps=3)
    found = judge(folder.case(right, right, facts={"optimizers": {}, **facts}))
    assert (found.verdict, [(cause.code, cause.advice) for cause in found.causes]) == ("equivalent", [(code, True)])
    assert evidence in found.causes[0].evidence


def test_advice_comes_after_what_decides(folder: Folder) -> None:
    right, wrong = Problem(steps=3), Problem(steps=3, scale=lambda rows, batch, n: 1 / rows)
    found = judge(folder.case(right, wrong, facts={"optimizers": {}, "constants": [CONSTANT]}))
    assert [cause.code for cause in found.causes] == ["loss-scaling", "static-tensor-in-graph"]
    assert found.verdict == "divergent"
