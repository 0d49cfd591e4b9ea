"""Programs that apply several batches together, and fewer of them on several devices: 4 here become 2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, Rerun, case_of, codes, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array

GRADIENTS = np.random.default_rng(2).normal(size=(3, 8, 128)).astype("f4")
"""Of each step and each of its eight rows."""
ROWS = [f"row-{k}" for k in range(24)]

Gradient = Callable[[Array, int], Array]
Reports = Callable[[int, int], list[tuple[str, str, float]]]


def as_it_is(gradient: Array, batches: int) -> Array:
    return gradient


def no_reports(step: int, batches: int) -> list[tuple[str, str, float]]:
    return []


def run(
    folder: Folder,
    replicas: int,
    batches: int,
    gradient: Gradient = as_it_is,
    objective: Callable[[int], float] = lambda batches: 1.5,
    reports: Reports = no_reports,
) -> Trace:
    def step(made: Made, k: int) -> None:
        made.event({"event": "program", "optimizers": {}, "clipped_by": ["clip_by_global_norm"]})
        for batch in range(batches):
            for kind, name, value in reports(k, batch):
                made.report(kind, name, k * batches + batch, value)
        for replica in range(replicas):
            rows = slice(replica * 8 // replicas, (replica + 1) * 8 // replicas)
            local = gradient(GRADIENTS[k, rows].sum(axis=0), batches)
            weights = {"w": np.ones(128, "f4")}
            named = [ROWS[8 * k + i] for i in range(8)[rows]]
            part = objective(batches) / replicas
            made.step(k, {"w": local}, weights, replica=replica, rows=named, objective=part, runs=batches)

    return loop(folder.made(f"1x{replicas}"), step)


def judged(
    folder: Folder,
    gradient: Gradient = as_it_is,
    *,
    clipped: bool = False,
    objective: Callable[[int], float] = lambda batches: 1.5,
) -> Judgement:
    def rerun(*asked: str) -> Rerun | None:
        return Rerun(run(folder, 1, 4), run(folder, 2, 2)) if clipped and asked[-1] == "no-clipping" else None

    reference, topology = run(folder, 1, 4, gradient, objective), run(folder, 2, 2, gradient, objective)
    return judge(case_of(reference, topology, rerun=rerun))


def test_fewer_batches_of_the_same_rows_are_the_same_step(folder: Folder) -> None:
    assert judged(folder).verdict == "equivalent"


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_losses_reported_for_each_batch_are_taken_together_as_the_objectives_are(folder: Folder, how: str) -> None:
    def each(batches: int) -> Reports:
        return lambda step, _: [("loss", "each/reduce", (1 + step) / (batches if how == "sum" else 1))]

    def made(replicas: int, batches: int, wrong: float = 1.0) -> Trace:
        reports = each(batches)

        def scaled(step: int, batch: int) -> list[tuple[str, str, float]]:
            return [(kind, name, wrong * value) for kind, name, value in reports(step, batch)]

        return run(folder, replicas, batches, objective=lambda n: 1.0 if how == "sum" else float(n), reports=scaled)

    assert judge(case_of(made(1, 4), made(2, 2))).verdict == "equivalent"
    assert codes(judge(case_of(made(1, 4), made(2, 2, wrong=2.0)))) == ["loss-report"]


def test_of_a_metric_that_counts_all_batches_the_last_result_is_compared(folder: Folder) -> None:
    def made(replicas: int, batches: int, last: float = 0.8) -> Trace:
        def reports(_: int, batch: int) -> list[tuple[str, str, float]]:
            return [("metric", "metric/accuracy", last if batch == batches - 1 else 0.1 * batch)]

        return run(folder, replicas, batches, reports=reports)

    assert judge(case_of(made(1, 4), made(2, 2))).verdict == "equivalent"
    assert codes(judge(case_of(made(1, 4), made(2, 2, last=0.9)))) == ["metric-aggregation"]


def test_means_that_are_added_up_and_not_divided_are_accumulation(folder: Folder) -> None:
    found = judged(folder, lambda gradient, batches: gradient * batches)
    assert codes(found) == ["accumulation"]
    assert found.causes[0].summary == (
        "Gradients of several batches are summed for one update and not divided by the number of batches: "
        "2 on 2 replicas, 4 on one device."
    )
    assert "gradient of one device = 0.5000 for all variables" in found.causes[0].evidence


def test_a_decay_that_comes_with_each_batch_is_accumulation(folder: Folder) -> None:
    def decayed(gradient: Array, batches: int) -> Array:
        return gradient + np.float32(0.5 * batches / (2 if batches == 2 else 1)) * np.ones(128, "f4")

    found = judged(folder, decayed)
    assert codes(found) == ["accumulation"]
    assert "is added once for each batch of an update: 2 on 2 replicas" in found.causes[0].summary


@pytest.mark.parametrize("known", [True, False])
def test_batches_that_are_clipped_one_by_one_are_accumulation(folder: Folder, known: bool) -> None:
    def clipped(gradient: Array, batches: int) -> Array:
        return np.clip(gradient, -0.1 * batches, 0.1 * batches)

    found = judged(folder, clipped, clipped=known)
    assert codes(found) == ["accumulation"]
    assert "Each batch of an update is changed on its own" in found.causes[0].summary
    assert ("with clipping switched off in both runs everything agrees" in found.causes[0].evidence) == known
    assert bool(found.not_compared) != known


def test_gradients_of_another_loss_are_not_blamed_on_the_number_of_batches(folder: Folder) -> None:
    other = judged(folder, lambda gradient, batches: gradient**batches, objective=lambda batches: 1.0 if batches == 2 else 1.3)
    assert "accumulation" not in codes(other)
    assert other.verdict == "divergent"
