"""The guide that makes a one-GPU script distributed: each step gets the verdict that the guide names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import emulate
from docs.examples import ROOT, blocks
from emulate.cluster import Preload
from emulate.report import render
from tests.few import few

GUIDE = ROOT / "docs" / "guides" / "distribute-a-script.md"
FOLDER = ROOT / "fixtures" / "distribute"
FIT = ("fit_with_strategy.py", "fit_plain.py")
LOOP = ("loop_with_strategy.py", "loop_plain.py")


@dataclass(frozen=True)
class Step:
    """A script of the guide, where it is verified, and the first cause; none where it is right."""

    name: str
    topologies: tuple[str, ...]
    cause: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {' '.join(self.topologies)}"


BOTH = ("1x4", "2x2")
STEPS = (
    Step("fit_one_gpu", ("1x4",), "replicas-missing"),
    Step("fit_with_strategy", ("1x4",), "uneven-batch"),
    Step("fit_plain", ("1x4",)),
    Step("fit_core", BOTH),
    Step("loop_one_gpu", ("1x4",), "replicas-missing"),
    Step("loop_with_strategy", BOTH, "clip-before-reduce"),
    Step("loop_plain", BOTH),
    Step("loop_plain", ("2x2",)),
    Step("loop_core", BOTH),
)
CAUSES = {FIT: ("batchnorm-local-statistics", None), LOOP: ("uneven-batch", "regularization-per-replica", None, None)}
"""The first cause after each of the guide's steps from the first script, with a strategy alone, to the second one."""


@pytest.mark.parametrize("step", few(STEPS, ("loop_plain 2x2",)))
def test_each_script_of_the_guide_gets_the_verdict_that_the_guide_names(
    step: Step, preload: Preload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    verdict = emulate.verify(FOLDER / f"{step.name}.py", step.topologies, preload=preload)
    for run in verdict.runs:
        assert (run.causes[0].code if run.causes else None) == step.cause, render(verdict)
        assert (run.verdict == "equivalent") is (step.cause is None), render(verdict)


def states(pair: tuple[str, str]) -> Iterator[str]:
    """Yield the first script of a pair after each step of the guide that changes it, with the lines of the blocks so far."""
    old, new = ((FOLDER / name).read_text().splitlines(keepends=True) for name in pair)
    mark = "diff: " + " ".join(f"fixtures/distribute/{name}" for name in pair)
    done: set[str] = set()
    for block in blocks(GUIDE):
        if block.mark == mark:
            done |= {line[0] + line[1:].strip() for line in block.text.splitlines() if line[0] in "+-"}
            yield "".join(_with(done, old, new))


def _with(done: set[str], old: list[str], new: list[str]) -> Iterator[str]:
    for line in difflib.ndiff(old, new):
        sign, text = line[0], line[2:]
        is_done = sign + text.strip() in done
        if sign == " " or (sign == "+" and is_done) or (sign == "-" and not is_done and not text.startswith('"""')):
            yield text


@pytest.mark.parametrize("pair", [FIT, LOOP], ids=["fit", "loop"])
def test_the_steps_of_the_guide_together_are_the_whole_way_to_the_right_script(pair: tuple[str, str]) -> None:
    *before, last = states(pair)
    assert len(before) + 1 == len(CAUSES[pair])
    assert last.strip() == (FOLDER / pair[1]).read_text().partition("\n")[2].strip()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [FIT, LOOP], ids=["fit", "loop"])
def test_gpudist_names_the_next_step_of_the_guide_after_each_step(
    pair: tuple[str, str], preload: Preload, tmp_path: Path
) -> None:
    found = []
    for state in states(pair):
        program = tmp_path / "train.py"
        program.write_text(state)
        run = emulate.verify(program, "1x4", preload=preload).runs[0]
        found.append(run.causes[0].code if run.causes else None)
    assert tuple(found) == CAUSES[pair]
