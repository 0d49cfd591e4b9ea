"""Numbers that a program reduces beside its loss, and those that it reduces several of in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.compare import compare
from emulate.verify.judge import Judgement, judge
from emulate.verify.recorded import NOISE_RUNS, RunPair
from tests.emulate.verify.cases import FakeLab, Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, right_reference, right_topology, weights_after
from tests.emulate.verify.made_traces import Made

ALONE = (0.25, 0.375, 0.5)


def judged(folder: Folder, numbers: dict[str, Sequence[Sequence[float]]]) -> Judgement:
    """By name what is reported in each step on one device, and on four."""

    def reporting(step: Any, place: int) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            for name, values in numbers.items():
                each = len(values[place]) // 3
                for number in range(k * each, (k + 1) * each):
                    made.report("loss", name, number, values[place][number], made=k + 1)

        return report

    alone, four = reporting(right_reference, 0), reporting(right_topology, 1)
    return judge(case_of(loop(folder.made(), alone), loop(folder.made("1x4"), four)))


LOSS = ((1.0, 1.0, 1.0),) * 2
"""What is trained: the reference's objective."""


@pytest.mark.parametrize(
    ("name", "there", "what"),
    [
        ("train/reduce 2", [4 * value for value in ALONE], "it is the sum over the 4 replicas instead of their mean"),
        (
            "train/reduce 2",
            [value / 4 for value in ALONE],
            "it is divided by the number of replicas (4) once too often, so it is 4x too small",
        ),
        ("main/local result", (0.5, 0.25, 0.5), "it is the number of one replica (experimental_local_results)"),
    ],
)
def test_a_number_beside_the_loss_is_a_metric_that_is_not_of_all_replicas(
    folder: Folder, name: str, there: Sequence[float], what: str
) -> None:
    found = judged(folder, {"train/reduce": LOSS, name: (ALONE, there)})
    assert codes(found) == ["metric-aggregation"]
    assert found.causes[0].summary == f"The reported number ({name}) does not cover all replicas: {what}."
    assert "ReduceOp.MEAN" in found.causes[0].fix


def test_a_number_without_one_beside_it_that_is_trained_is_taken_for_the_loss(folder: Folder) -> None:
    assert codes(judged(folder, {"train/reduce": (ALONE, [4 * value for value in ALONE])})) == ["loss-report"]


def test_what_is_reported_less_often_than_the_loss_may_be_a_loss_of_other_rows(folder: Folder) -> None:
    twice = (*ALONE, *ALONE)
    numbers = {"train/reduce": LOSS, "validate/reduce": (twice, [4 * value for value in twice])}
    assert codes(judged(folder, numbers)) == ["loss-report"]


def test_of_several_numbers_of_one_name_in_a_step_each_belongs_to_its_step(folder: Folder) -> None:
    alone = tuple(float(k) for k in range(1, 10))
    there = (*alone[:7], 16.0, *alone[8:])
    found = judged(folder, {"train/reduce": (alone, there)})
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.report) == (2, 7)


@pytest.mark.parametrize(
    ("there", "verdict"),
    [
        ((1.5, 2.5, 4.5), "equivalent"),  # a mean of batches twice as large
        ((3.0, 5.0, 9.0), "equivalent"),  # or their sum
        ((1.5, 3.0, 4.5), "divergent"),
    ],
    ids=["mean", "sum", "other rows"],
)
def test_an_evaluation_in_larger_batches_is_judged_as_a_whole(folder: Folder, there: Sequence[float], verdict: str) -> None:
    alone = (1.0, 2.0, 2.0, 3.0, 4.0, 5.0)
    found = judged(folder, {"train/reduce": LOSS, "validate/reduce": (alone, there)})
    assert found.verdict == verdict
    said = "validate/reduce (in other batches, with the same total)"
    assert (said in found.not_compared) == (verdict == "equivalent")


@pytest.mark.parametrize("steps", [2, 3])  # with two steps what is reported once is no more seldom than a loss may be
def test_what_replicas_evaluate_with_moving_statistics_of_their_own_is_not_compared_with_one_devices(
    folder: Folder, steps: int
) -> None:
    def reporting(step: Any, by_share: bool) -> Any:
        def report(made: Made, k: int) -> None:
            if k == 0:
                made.event({"event": "program", "by_share": by_share})
            step(made, k)
            made.report("loss", "batch/loss", k, 1.0)
            if k == steps - 1:
                for name in ("evaluate/loss", "epoch/loss", "epoch/val_loss"):
                    made.report("loss", name, 0, 0.4 if step is right_reference else 0.5, made=steps)

        return report

    def compared(by_share: bool) -> tuple[set[str], Sequence[str]]:
        one = loop(folder.made(), reporting(right_reference, by_share), steps)
        found = compare(one, loop(folder.made("1x4"), reporting(right_topology, by_share), steps))
        return {point.measure.key.tensor for point in found.exceeding}, found.not_compared

    assert compared(False) == ({"evaluate/loss", "epoch/loss", "epoch/val_loss"}, ())
    exceeding, not_compared = compared(True)
    assert exceeding == {"epoch/loss"}
    assert [text.partition(" ")[0] for text in not_compared] == ["evaluate/loss", "epoch/val_loss"]


class _FirstFails(FakeLab):
    def __init__(self, runs: Sequence[Trace]) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self._runs = runs

    def run_program(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        self.numbers.append(number)
        return [] if number == 1 else self._runs


def test_where_the_first_run_of_the_program_fails_the_others_measure_what_it_reports(folder: Folder) -> None:
    def run(topology: str, loss: float) -> Trace:
        def step(made: Made, k: int) -> None:
            (right_reference if topology == "1x1" else right_topology)(made, k)
            made.report("loss", "batch/loss", k, 1.0)
            if k == 2:
                made.report("loss", "evaluate/loss", 0, loss, made=3)

        return loop(folder.made(topology), step)

    reference, topology = run("1x1", 0.5), run("1x4", 0.5001)
    assert compare(reference, topology).differs_in_late_reports
    lab = _FirstFails([run("1x1", 0.5002), run("1x1", 0.4999)])
    assert lab.compare(RunPair(reference, topology), kinks=True).is_equivalent
    assert lab.numbers == [1, NOISE_RUNS]


@pytest.mark.parametrize(
    ("share", "reported", "expected"),
    [
        (0.25, 1.0, ["local-normalization"]),
        (0.25, 0.25, ["local-normalization", "loss-report"]),
        (1.0, 0.25, ["local-normalization"]),
    ],
    ids=["what is trained", "a quarter of it", "what one device has"],
)
def test_a_run_that_trains_another_loss_is_told_of_a_report_only_if_that_is_farther_off(
    folder: Folder, share: float, reported: float, expected: list[str]
) -> None:
    """Each replica divides its loss by its own count; `reported` is a part of the sum of the replicas' losses."""
    weights = np.array([0.5, 1.5, 0.75, 1.25], "f4")

    def alone(made: Made, k: int) -> None:
        right_reference(made, k)
        made.report("loss", "train/reduce", k, 1.0, made=k + 1)

    def four(made: Made, k: int) -> None:
        off = [0.02 * (k + 1), 0.05, 0.03, 0.01]
        for r in range(4):
            gradient = LOCALS[k, r] / weights[r] * np.float32(4 * share)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": gradient}, {"w": weights_after(k)}, replica=r, rows=rows, objective=share * (1 + off[r]))
        made.report("loss", "train/reduce", k, reported * share * (4 + sum(off)), made=k + 1)

    found = judge(case_of(loop(folder.made(), alone), loop(folder.made("1x4"), four)))
    assert codes(found) == expected
