"""A batch that grows with the replicas: what is said of a program that takes as many steps all the same."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.references import note_of_more_examples
from tests.emulate.verify.cases import Folder

ROWS = [f"row-{k}" for k in range(64)]


def trained(folder: Folder, replicas: int, steps: int, reason: str = "returned") -> Trace:
    """Steps of four rows on each replica."""
    made = folder.made(f"1x{replicas}")
    weights = np.ones(3, "f4")
    for r in range(replicas):
        made.initial({"w": weights}, r)
    for k in range(steps):
        for r in range(replicas):
            at = 4 * (replicas * k + r)
            made.step(k, {"w": weights}, {"w": weights}, replica=r, rows=ROWS[at : at + 4], objective=1.0)
    made.event({"event": "end", "reason": reason})
    return made.trace()


def test_a_program_that_takes_as_many_steps_of_a_larger_batch_is_told_how_many_rows_that_makes(folder: Folder) -> None:
    told = note_of_more_examples(trained(folder, 1, 6), trained(folder, 2, 6))
    assert told is not None
    assert told.startswith("To its end it trains on 48 examples in 6 steps, one device on 24 in 6: ")
    assert "a batch 2x as large needs 2x fewer steps" in told


@pytest.mark.parametrize(("steps", "reason"), [(3, "returned"), (6, "reached")])
def test_nothing_is_said_where_it_takes_fewer_or_was_not_seen_to_its_end(folder: Folder, steps: int, reason: str) -> None:
    assert note_of_more_examples(trained(folder, 1, 6), trained(folder, 2, steps, reason)) is None
