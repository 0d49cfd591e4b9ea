"""The gallery has an entry for each issue, and the script behind it measures what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import benchmarks.arms
import emulate
from benchmarks.arms import PAGE, PROGRAMS, ROOT, VERDICTS, compiled_step, difference, verdict_line
from emulate.cluster import Preload
from emulate.verify import Difference, Run

ISSUES = {number for path in PROGRAMS.glob("*.py") for number in re.findall(r"\b(\d{5,6})\b", path.read_text().split('"""')[1])}


def test_the_gallery_names_each_issue() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert len(ISSUES) == 11
    assert set(re.findall(r"#(\d{5,6})\b", gallery)) == ISSUES | {"116992"}


def test_the_tables_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    results = re.findall(r"^\| `.*` \| \d \| (.*) \|$", text, re.MULTILINE)
    (line,) = re.findall(r"^\| 120993 \| (.*) \|$", text, re.MULTILINE)
    xla, ulp, *losses = map(float, line.split(" | "))
    arms = {name: {"loss": loss} for name, loss in zip(("plain", "xla", "ulp"), losses, strict=True)}
    found = {"120993": {**arms, "xla": {**arms["xla"], "gradients": xla}, "ulp": {**arms["ulp"], "gradients": ulp}}}
    answers = iter([json.dumps(found), *results])
    monkeypatch.setattr(benchmarks.arms, "in_a_process", lambda *_, **__: next(answers))
    assert benchmarks.arms.table_of(["120993"]) == text


def test_the_table_of_verdicts_has_a_line_for_each_report_as_the_script_writes_it() -> None:
    lines = VERDICTS.read_text(encoding="utf-8").splitlines(keepends=True)[2:]
    found = re.findall(r"#(\d+)\].*\| (\S+) \| (?:not finite in step (\d+)|([\d.]+)) \|", "".join(lines))
    runs = [
        Run("1x2", verdict, worst=Difference("a", "gradient", int(step or 0), float(ratio or 0), 1.0, non_finite=bool(step)))
        for _, verdict, step, ratio in found
    ]
    assert [verdict_line(report, run) for (report, *_), run in zip(found, runs, strict=True)] == lines
    assert [report for report, *_ in found] == list(compiled_step().REPORTS)


def test_gradients_are_compared_in_parts_of_their_largest_number() -> None:
    ours, theirs = [np.array([1.0, -4.0]), np.array([0.5])], [np.array([1.0, -3.0]), np.array([0.5])]
    assert difference(ours, theirs) == 0.25
    assert difference(ours, ours) == 0


@pytest.mark.parametrize(
    ("program", "topology", "options", "verdict", "causes"),
    [
        ("ring_and_auto.py", "2x1", {"args": ["RING"], "against": "AUTO"}, "equivalent", []),
        ("last_batch.py", "1x4", {"args": ["--own-loss"]}, "divergent", ["empty-shard", "loss-scaling"]),
        pytest.param("last_batch.py", "1x4", {}, "divergent", ["empty-shard"], marks=pytest.mark.slow),
        pytest.param("last_batch.py", "1x4", {"args": ["--even"]}, "by-design", [], marks=pytest.mark.slow),
    ],
)
def test_gpudist_says_of_the_programs_what_the_gallery_says(
    program: str, topology: str, options: dict[str, Any], verdict: str, causes: list[str], preload: Preload
) -> None:
    (run,) = emulate.verify(PROGRAMS / program, topology, steps=None, preload=preload, **options).runs
    assert (run.verdict, [cause.code for cause in run.causes if not cause.by_design]) == (verdict, causes)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "broken"), [(1, "none"), (4, "sequential/normalization/gamma")])
def test_replicas_without_examples_break_batch_normalization(devices: int, broken: str) -> None:
    command = [sys.executable, "-m", "benchmarks.arms", "--run", "last_batch.py"]
    environment = {**os.environ, "ARMS_DEVICES": str(devices)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.splitlines()[-1].endswith(f"not finite: none; such variables: {broken}")
