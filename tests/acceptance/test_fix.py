"""Real programs with a bug get an edit that a verification proves; right ones are left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import emulate
from benchmarks.scorecard import table
from benchmarks.scorecard.cells import Job
from benchmarks.scorecard.corpus import corpus
from emulate.cluster import Preload
from emulate.program import Program
from emulate.report import render
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
    "bugs/initial_weights": "initial-weights",
    "bugs/replicas_missing": "replicas-missing",
    "bugs/samples_missing": "samples-missing",
    "bugs/samples_missing_multiworker": "samples-missing",
    "bugs/samples_repeated": "samples-repeated",
    "bugs/samples_repeated_from_function": "samples-repeated",
    "bugs/unseeded_hosts": "unseeded-hosts",
    "bugs/update_scaling": "update-scaling",
    "bugs/variable_aggregation": "variable-aggregation",
    "corpus/wrong_uneven_fit": "uneven-batch",
    "tutorial/train": "uneven-batch",
    "bugs/framework_limit_accumulation": "framework-limit",
    "bugs/framework_limit_first_batch": "framework-limit",
}
"""Programs with the cause that an edit removes."""
ON_HOSTS = ("replicas_missing", "missing_multiworker", "samples_repeated", "from_function", "unseeded_hosts", "update_scaling")
"""Parts of the names of those that are wrong on several hosts alone."""
_STORED = table.stored()
OTHERS = {"1x2": "1x4", "1x3": "1x2", "1x4": "1x2", "2x1": "2x2", "2x2": "2x1"}
"""Another topology for each, on which the same programs run."""
FIXED = {
    entry.name: entry
    for entry in corpus()
    if any((cell := _STORED.get(name)) and cell.fixed for name in Job(entry).names.values())
}
"""The programs of the corpus for which the scorecard has a proven fix."""


def program(name: str) -> Program:
    return Program.find(str(FIXTURES / f"{name}.py"))


@pytest.mark.parametrize("name", few(PROVEN, ["bugs/local_normalization"]))
def test_a_wrong_program_gets_a_proven_fix(name: str, preload: Preload) -> None:
    report = fix(program(name), ["2x1" if name.endswith(ON_HOSTS) else "1x4"], preload=preload)
    assert report.exit_code == 0, report.not_fixed
    assert [one.code for one in report.fixes] == [PROVEN[name]]
    assert [one.verdict_after for one in report.fixes] == ["equivalent"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_a_proven_fix_holds_with_another_seed_more_steps_and_another_topology(name: str, preload: Preload) -> None:
    entry = FIXED[name]
    wrong = Program.find(str(entry.path), entry.args)
    report = fix(wrong, entry.topologies, preload=preload)
    assert report.exit_code == 0, report.not_fixed
    edited = replace(wrong, edits=tuple((file, texts.after) for file, texts in report.files.items()))
    others = [OTHERS[topology] for topology in entry.topologies]
    verdict = emulate.verify(edited, others, seed=7, steps=60, preload=preload)
    assert verdict.is_equivalent, f"{report.patch}\n{render(verdict)}"


def test_the_scorecard_has_proven_fixes_to_confirm() -> None:
    assert len(FIXED) >= 10


@pytest.mark.slow
def test_batch_normalization_is_synchronized_where_its_statistics_count_as_a_failure(preload: Preload) -> None:
    report = fix(program("bugs/batchnorm_local_statistics"), ["1x4"], strict=True, preload=preload)
    assert report.exit_code == 0, report.not_fixed
    assert [one.code for one in report.fixes] == ["batchnorm-local-statistics"]


@pytest.mark.slow
def test_a_wrong_notebook_gets_a_proven_fix_in_its_cell(preload: Preload, tmp_path: Path) -> None:
    text = (
        (FIXTURES / "bugs" / "loss_scaling.py")
        .read_text()
        .replace("Path(__file__).resolve().parents[1]", f"Path({str(FIXTURES)!r})")
    )
    first, second = text.split("\n\n\n", 1)
    cells = [["%matplotlib inline\n", *first.splitlines(keepends=True)], second.splitlines(keepends=True)]
    content = {
        "cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells],
        "metadata": {},
    }
    file = tmp_path / "train.ipynb"
    file.write_text(json.dumps(content, indent=1))
    report = fix(Program.find(str(file)), ["1x4"], preload=preload)
    assert report.exit_code == 0, report.not_fixed
    [edit], [texts] = report.fixes, report.files.values()
    before, after = (json.loads(text)["cells"] for text in (texts.before, texts.after))
    assert edit.place.startswith("train.ipynb, cell 2:")
    assert before[0] == after[0]
    assert "num_replicas_in_sync" in "".join(set(after[1]["source"]) - set(before[1]["source"]))


@pytest.mark.slow
def test_a_right_program_gets_no_edit(preload: Preload) -> None:
    report = fix(program("programs/eager_loop"), ["1x4"], preload=preload)
    assert (report.exit_code, report.fixes, report.verifications) == (0, (), 1)
