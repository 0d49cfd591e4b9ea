"""Our own library loses no digits where a program computes in float64: numbers of 32 bits in it would show as divergences."""

from __future__ import annotations

from pathlib import Path

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = Path(__file__).parents[2] / "fixtures" / "everyday_cases" / "core_float64.py"


def test_gpudist_core_computes_in_the_precision_of_the_program(preload: Preload) -> None:
    verdict = emulate.verify(PROGRAM, "1x2", precision="float64", preload=preload)
    (run,) = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert run.worst is not None
    assert run.worst.error < 1e-13
