"""What is not compared is listed by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

COUNTER = Path(__file__).parents[2] / "fixtures" / "everyday_cases" / "restored_counter.py"


def test_variables_that_training_changes_and_no_step_shows_are_listed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: Preload
) -> None:
    """Metrics, the learning rate and what a step reads show in what is compared."""
    monkeypatch.chdir(tmp_path)
    verdict = emulate.verify(COUNTER, "1x2", preload=preload)
    (run,) = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert run.not_compared == (
        "variable seen (each replica keeps its own value, restored_counter.py:39)",
        "variable rounds (assigned outside of Strategy.run)",
    )
