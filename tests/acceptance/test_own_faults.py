"""A fault of gpudist's own never breaks a program, and never becomes a verdict on it."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.verify import Run

PROGRAM = Path(__file__).parents[2] / "fixtures" / "everyday_cases" / "every_point.py"
"""It makes gpudist's wrappers fail at the points that its arguments name."""
POINTS = [
    "StrategyBase.run",
    "the function of Strategy.run",
    "Layer.__call__",
    "GradientTape.gradient",
    "ReplicaContextBase.all_reduce",
    "BaseOptimizer.apply",
    "DistributedVariable.assign_add",
    "StrategyBase.reduce",
    "CallbackList.on_epoch_end",
    "tensorflow.clip_by_norm",
    "gen_random_ops.random_uniform",
    "DatasetV2.map",
]


def _judged(when: str, at: str, preload: Preload) -> Run:
    (run,) = emulate.verify(PROGRAM, "1x2", args=(when, at), preload=preload).runs
    return run


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_ends_as_without_gpudist_where_every_wrapper_fails(when: str, preload: Preload) -> None:
    run = _judged(when, "all", preload)
    assert (run.verdict, run.failure, run.causes) == ("unverified", None, ())
    (told,) = [text for text in run.not_compared if "gpudist itself failed" in text]
    assert all(f"made to fail {when} {point}" in told for point in ("StrategyBase.run", "BaseOptimizer.apply", "DatasetV2.map"))
    assert "fault of gpudist" in told


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", POINTS)
def test_one_wrapper_that_fails_is_told_and_nothing_is_concluded(when: str, at: str, preload: Preload) -> None:
    run = _judged(when, at, preload)
    assert (run.verdict, run.failure, run.causes) == ("unverified", None, ())
    (told,) = [text for text in run.not_compared if "gpudist itself failed" in text]
    assert f"gpudist itself failed at {at} (RuntimeError: made to fail {when} {at})." in told
