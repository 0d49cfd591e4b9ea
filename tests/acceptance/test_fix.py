"""Real programs with a bug get an edit that a verification proves; right ones are left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.program import Program
from tests.few import few

pytest.importorskip("libcst")

from emulate.fix import fix

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROVEN = {
    "bugs/loss_scaling": "loss-scaling",
    "bugs/local_normalization": "local-normalization",
    "bugs/regularization_per_replica": "regularization-per-replica",
    "bugs/clip_before_reduce_custom_loop": "clip-before-reduce",
    "bugs/uneven_batch_average_loss": "uneven-batch",
    "bugs/loss_report": "loss-report",
    "bugs/missing_all_reduce": "missing-all-reduce",
    "bugs/unseeded_randomness": "unseeded-randomness",
    "corpus/wrong_uneven_fit": "uneven-batch",
}
"""Programs with the cause that an edit removes."""
CONFIRMED = tuple(PROVEN)[:4]
"""Programs whose edit is verified under other conditions, too."""


def program(name: str) -> Program:
    return Program.find(str(FIXTURES / f"{name}.py"))


@pytest.mark.parametrize("name", few(PROVEN, ["bugs/local_normalization"]))
def test_a_wrong_program_gets_a_proven_fix(name: str, preload: Preload) -> None:
    report = fix(program(name), ["1x4"], preload=preload)
    assert report.exit_code == 0, report.not_fixed
    assert [one.code for one in report.fixes] == [PROVEN[name]]
    assert [one.verdict_after for one in report.fixes] == ["equivalent"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIRMED)
def test_a_proven_fix_holds_with_another_seed_more_steps_and_another_topology(name: str, preload: Preload) -> None:
    wrong = program(name)
    report = fix(wrong, ["1x4"], preload=preload)
    edited = replace(wrong, edits=tuple((file, texts.after) for file, texts in report.files.items()))
    assert emulate.verify(edited, "1x2", seed=7, steps=60, preload=preload).verdict == "equivalent"


@pytest.mark.slow
def test_a_right_program_gets_no_edit(preload: Preload) -> None:
    report = fix(program("programs/eager_loop"), ["1x4"], preload=preload)
    assert (report.exit_code, report.fixes, report.verifications) == (0, (), 1)
