"""The verdicts in the README are what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

ROOT = Path(__file__).parents[2]
WRONG = "fixtures/bugs/loss_scaling_multiworker.py"
LOSES = "fixtures/recoveries/loses_the_optimizer.py"


def _texts(printed: str) -> list[str]:
    """Its lines but for those that name versions and seconds; numbers are rounded otherwise on other machines."""
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    kept = [line for line in lines if not re.match(r"seed \d|   topology|[✔✘] ", line)]
    return [re.sub(r"\d[\d.e+-]*", "N", line) for line in kept]


@pytest.mark.parametrize(
    ("program", "topologies", "options"),
    [(WRONG, ["1x4", "2x2"], {}), (LOSES, ["2x1"], {"faults": ["kill:host=1,step=8,phase=all-reduce"]})],
)
def test_what_the_readme_shows_is_printed(
    preload: Preload, monkeypatch: pytest.MonkeyPatch, program: str, topologies: list[str], options: Any
) -> None:
    monkeypatch.chdir(ROOT)
    printed = render(emulate.verify(program, topologies, preload=preload, **options))
    blocks = re.findall(r"^```\n(.*?)^```$", Path("README.md").read_text(), re.DOTALL | re.MULTILINE)
    (shown,) = (block for block in blocks if f"\n{program}\n" in f"\n{block}")
    begins = f"{program}\nseed "
    assert _texts(shown.partition(begins)[2]) == _texts(printed.partition(begins)[2])
