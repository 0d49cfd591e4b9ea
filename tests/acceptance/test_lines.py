"""A wrong program's finding points at the line that is wrong."""

from __future__ import annotations

import pytest

import emulate
from benchmarks.scorecard.corpus import FOLDER, read
from emulate.cluster import Preload

PROGRAMS = {
    "wrong_clip_in_step": "given",
    "wrong_clipnorm_fit": "given",
    "wrong_layer_state": "loss",
    "wrong_mean_eager_adam": "loss",
    "wrong_tokens_per_replica": "loss",
}


@pytest.mark.parametrize(("name", "stage"), PROGRAMS.items())
def test_a_finding_points_at_the_wrong_line(name: str, stage: str, preload: Preload) -> None:
    (entry,) = read(FOLDER / f"{name}.py")
    run = emulate.verify(str(entry.path), topology="1x2", steps=4, preload=preload).runs[0]
    first = run.causes[0]
    assert (first.code, first.stage) == (entry.answer.causes[0], stage)
    assert first.location is not None
    assert first.location.line in entry.answer.lines
    assert "# BUG" in first.location.text
