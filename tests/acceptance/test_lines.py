"""A wrong program's finding points at the line that is wrong."""

from __future__ import annotations

import pytest

import emulate
from benchmarks.scorecard.corpus import read
from emulate.cluster import Preload
from fixtures.corpus.index import FOLDER
from tests.few import few

PROGRAMS = {
    "wrong_clip_in_step": "given",
    "wrong_clipnorm_fit": "given",
    "wrong_layer_state": "loss",
    "wrong_mean_eager_adam": "loss",
    "wrong_tokens_per_replica": "loss",
}


# test_scorecard.py has lines of other stages.
@pytest.mark.parametrize("name", few(PROGRAMS, ("wrong_clip_in_step",)))
def test_a_finding_points_at_the_wrong_line(name: str, preload: Preload) -> None:
    (entry,) = read(FOLDER / f"{name}.py")
    run = emulate.verify(str(entry.path), topology="1x2", steps=4, preload=preload).runs[0]
    first = run.causes[0]
    assert (first.code, first.stage) == (entry.answer.causes[0], PROGRAMS[name])
    assert first.location is not None
    assert first.location.line in entry.answer.lines
    assert "# BUG" in first.location.text
