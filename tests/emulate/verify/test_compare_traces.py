"""Recorded runs are compared as they ended: one that was killed or raised is not equivalent."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.errors import WrongUse
from emulate.verify import compare_traces
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem, train


def recorded(folder: Path, replicas: int, ends: str | None) -> Path:
    made = train(Problem(steps=2), Made(folder, f"1x{replicas}"), replicas)
    if ends is not None:
        made.event({"event": "end", "reason": ends})
    made.trace()
    return folder


def test_a_recorded_run_that_ended_well_is_compared(tmp_path: Path) -> None:
    for ends in ("returned", "steps"):
        run = compare_traces(recorded(tmp_path / f"one-{ends}", 1, ends), recorded(tmp_path / f"two-{ends}", 2, ends))
        assert (run.verdict, run.failure) == ("equivalent", None)


@pytest.mark.parametrize(("ends", "how"), [(None, "stopped"), ("raised", "raised")])
def test_a_recorded_run_that_was_killed_or_raised_failed(tmp_path: Path, ends: str | None, how: str) -> None:
    run = compare_traces(recorded(tmp_path / "one", 1, "returned"), recorded(tmp_path / "two", 2, ends))
    assert run.verdict == "failed"
    assert run.failure == f"The recorded run did not end well: host 0 {how} after 2 steps."


@pytest.mark.parametrize(("ends", "how"), [(None, "stopped"), ("raised", "raised")])
def test_a_reference_that_was_killed_or_raised_is_nothing_to_compare_with(tmp_path: Path, ends: str | None, how: str) -> None:
    run = compare_traces(recorded(tmp_path / "one", 1, ends), recorded(tmp_path / "two", 2, "steps"))
    assert (run.verdict, run.reason) == ("failed", "reference")
    assert run.failure is not None
    assert run.failure.endswith(f"run did not end well: host 0 {how} after 2 steps.")


def test_a_trace_whose_arrays_were_cut_off_is_refused(tmp_path: Path) -> None:
    reference, topology = recorded(tmp_path / "one", 1, "steps"), recorded(tmp_path / "two", 2, "steps")
    with (topology / "host-0" / "arrays.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(WrongUse, match=r"A trace's arrays must be complete\. Received: .* Copy it again"):
        compare_traces(reference, topology)
