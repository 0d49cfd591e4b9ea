"""Whole batches that come earlier or later than on one device have a cure of their own: some were taken before the training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.made_traces import Made

EPOCHS = [0, 1, 2, 3, 2, 0, 3, 1, 1, 3]
"""Batches of two epochs, shuffled anew, and some of a third."""


def run(folder: Folder, replicas: int, batches: Sequence[int], *, compiled: bool = False, ended: bool = False) -> Trace:
    def step(made: Made, k: int) -> None:
        for r in range(replicas):
            mine = [f"{batches[k]}-{i}" for i in range(8 // replicas * r, 8 // replicas * (r + 1))]
            made.step(k, {"w": np.full(128, 1 / replicas)}, {"w": np.full(128, float(k))}, replica=r, rows=mine, objective=1.0)

    made = folder.made(f"1x{replicas}")
    made.event({"event": "program", "compiled": compiled})
    made.report("metric", "batch/auc", 0, 0.5 / replicas)
    if ended:
        made.event({"event": "end", "reason": "returned"})
    return loop(made, step, steps=len(batches))


def judged(folder: Folder, one_device: Sequence[int], batches: Sequence[int], *, compiled: bool = False) -> Judgement:
    return judge(case_of(run(folder, 1, one_device), run(folder, 2, batches, compiled=compiled)))


@pytest.mark.parametrize(("moved", "how"), [(1, "1 batch later"), (2, "2 batches later"), (-1, "1 batch earlier")])
def test_batches_that_begin_at_another_one_are_told_from_rows_in_other_batches(folder: Folder, moved: int, how: str) -> None:
    stream = [*EPOCHS, 0, 2]
    theirs, ours = (stream[max(0, by) : max(0, by) + 8] for by in (-moved, moved))
    found = judged(folder, theirs, ours)
    assert codes(found) == ["samples-reordered"]
    assert found.causes[0].summary == f"The batches are those of one device in the same order, but begin {how}."
    assert "AutoShardPolicy" not in found.causes[0].fix
    assert "PyDataset" not in found.causes[0].fix


def test_the_cure_of_a_fit_is_one_worker(folder: Folder) -> None:
    found = judged(folder, EPOCHS[:8], EPOCHS[1:9], compiled=True)
    assert codes(found) == ["samples-reordered"]
    assert "workers=1, use_multiprocessing=False" in found.causes[0].fix


def test_batches_in_another_order_are_not_only_moved(folder: Folder) -> None:
    found = judged(folder, [0, 1, 2, 3, 4, 5], [1, 2, 3, 5, 4, 0], compiled=True)
    assert codes(found) == ["samples-reordered"]
    assert "other batches" in found.causes[0].summary
    assert "AutoShardPolicy" in found.causes[0].fix


@pytest.mark.parametrize("batches", [[0, 1, 0, 1], [0, 1, 2, 3]])
def test_fewer_steps_of_the_same_batches_miss_rows_whether_or_not_they_came_before(folder: Folder, batches: list[int]) -> None:
    found = judge(case_of(run(folder, 1, batches), run(folder, 2, batches[:2], ended=True)))
    assert codes(found) == ["samples-missing"]
    assert "there are fewer steps" in found.causes[0].fix
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == ("data", 2)  # not the metric of an epoch so far
