"""A judgement from stored runs is the one that was recorded, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from benchmarks.evidence.recording import RecordingRunner
from benchmarks.evidence.store import RUNS, from_plain, runs_file, to_plain
from benchmarks.evidence.stored import Asked, StoredRunner
from emulate.told import Told
from emulate.topology import Topology
from emulate.verify.lab import Lab
from emulate.verify.result import Met, RunResult
from emulate.verify.runner import Runner
from emulate.verify.session import Session
from emulate.verify.verdict import Run
from tests.emulate.verify.cases import Folder
from tests.emulate.verify.fake_runner import Answer, FakeRunner
from tests.emulate.verify.simulation import Problem
from tests.emulate.verify.test_session import FOUR, RIGHT, WRONG, answer_of


def verdict(module: str, make: Callable[..., Any], fake: FakeRunner) -> Run:
    """Judge with a runner of the evidence, which hands on to this one."""

    def handed_on(*_: Any, **__: Any) -> FakeRunner:
        return fake

    with mock.patch(f"benchmarks.evidence.{module}.Runner", handed_on):
        runner = make(fake.settings, None)
    _, (run,), _ = Session(Lab(cast(Runner, runner), seed=0), "train.py", ()).judge([FOUR])
    return run


def record(cell: Path, answer: Answer) -> Run:
    return verdict("recording", lambda *given: RecordingRunner(cell, *given), FakeRunner(answer))


def judge(cell: Path, answer: Answer) -> tuple[Run, Asked, FakeRunner]:
    asked, fake = Asked(), FakeRunner(answer, folder=cell / RUNS)
    return verdict("stored", lambda *given: StoredRunner(cell, asked, *given), fake), asked, fake


def forget(cell: Path, label: str) -> None:
    """Take a run out of the evidence."""
    lines = runs_file(cell).read_text().splitlines(keepends=True)
    kept = [line for line in lines if f'"label": "{label}"' not in line]
    assert len(kept) == len(lines) - 1
    runs_file(cell).write_text("".join(kept))


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    (tmp_path / RUNS).mkdir()
    return tmp_path


@pytest.mark.parametrize("there", [RIGHT, WRONG, Problem(seed=7, steps=4)], ids=["right", "wrong factor", "other weights"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_judgement_from_evidence_is_the_recorded_one(cell: Path, there: Problem, is_eager: bool) -> None:
    answer = answer_of(Folder(cell / RUNS), there, is_eager=is_eager)
    recorded = record(cell, answer)
    again, asked, fake = judge(cell, answer)
    assert again == recorded
    assert (asked.evaluated, asked.lacking, fake.made) == ([], [], [])


def test_an_evaluation_that_is_not_stored_is_made_from_the_stored_functions(cell: Path) -> None:
    answer = answer_of(Folder(cell / RUNS), WRONG)
    recorded = record(cell, answer)
    label = "noise 2 gradients of " + next(path.name for path in sorted((cell / RUNS).iterdir()))
    forget(cell, label)
    again, asked, fake = judge(cell, answer)
    assert (again.verdict, again.causes[0].code) == (recorded.verdict, recorded.causes[0].code)
    assert asked.evaluated == fake.made == [label]
    assert (asked.lacking, fake.started) == ([], [])


def test_a_start_that_is_not_stored_is_refused_and_told(cell: Path) -> None:
    answer = answer_of(Folder(cell / RUNS), RIGHT)
    record(cell, answer)
    forget(cell, "1x4")
    again, asked, fake = judge(cell, answer)
    assert again.verdict == "failed"
    assert asked.lacking == ["1x4"]
    assert fake.started == []


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = RunResult(
        "2x1",
        Topology.parse("2x1"),
        None,
        "failed",
        raised={1: "ValueError"},
        hosts={0: {"step": 3}},
        codes={0: None, 1: -9},
        notes=[Told("raising-host", "It was host 1 that raised.")],
        written={"/data/log": True},
        met=Met(found=("/data/log",)),
        saved={"model": {0, 1}},
        cut={1},
    )
    again = from_plain(to_plain(result), tmp_path)
    assert again == result
    assert again.notes[0].code == "raising-host"
