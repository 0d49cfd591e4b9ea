"""The path of a new user: the commands of README, then an own CNN, with each fix applied as gpudist prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import emulate
from docs.examples import ROOT, blocks
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify.causes import all_causes

CNN = ROOT / "fixtures" / "new_user" / "cnn_fit.py"
FEW, STEPS = 4, 12  # an epoch has 11 batches, of which the last is smaller
MOST_FIXES = 4
IMPORT = "import gpudist_core as gd"
CHOSEN = "strategy = gd.make_strategy()"


def with_fix(source: str, fix: str) -> str:
    """Put the code of gpudist_core that a fix shows into a program with `fit`, where the fix says: before `compile`."""
    fixed = source if IMPORT in source or IMPORT not in fix else source.replace("\nstrategy =", f"\n{IMPORT}\n\nstrategy =", 1)
    if CHOSEN in fix:
        fixed = re.sub(r"^strategy = .*$", CHOSEN, fixed, flags=re.MULTILINE)
    if call := re.search(r"gd\.distributed\(model(, [^)]*)?\)", fix):
        fixed = re.sub(r"^ *model = gd\.distributed\(.*\n", "", fixed, flags=re.MULTILINE)
        fixed = re.sub(r"^( *)(?=model\.compile\()", rf"\1model = {call[0]}\n\1", fixed, count=1, flags=re.MULTILINE)
    return fixed


def follow_fixes(program: Path, topology: str, preload: Preload) -> list[str]:
    """Verify, apply the fix of the first cause, and verify again, until nothing differs; return the causes."""
    codes: list[str] = []
    for _ in range(MOST_FIXES):
        verdict = emulate.verify(program, topology, steps=FEW, preload=preload)
        if verdict.runs[0].verdict == "equivalent":
            return codes
        cause = verdict.runs[0].causes[0]
        codes.append(cause.code)
        fixed = with_fix(program.read_text(), cause.fix)
        assert fixed != program.read_text(), f"The fix of {cause.code} changes nothing:\n{render(verdict)}"
        program.write_text(fixed)
    raise AssertionError(f"Fixed {codes}, and still:\n{render(verdict)}")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the user's program."""
    monkeypatch.chdir(tmp_path)


# The slow tests below judge all mistakes of the CNN, and the first program of README.
def test_the_printed_fixes_for_fit_make_a_cnn_right_on_several_hosts(preload: Preload, tmp_path: Path) -> None:
    (clipping,) = (cause for cause in all_causes() if cause.code == "clip-before-reduce")
    program = tmp_path / "train.py"
    program.write_text(with_fix(CNN.read_text(), "\n".join(clipping.text.fixes.values())))
    assert follow_fixes(program, "2x2", preload) == ["replicas-missing"]


@pytest.mark.slow
def test_a_new_user_who_follows_the_fixes_gets_a_right_cnn_on_each_topology(preload: Preload, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(CNN.read_text())
    codes = follow_fixes(program, "1x4", preload)
    assert codes[0] in ("clip-before-reduce", "uneven-batch", "batchnorm-local-statistics")
    assert follow_fixes(program, "2x2", preload) == ["replicas-missing"]
    verdict = emulate.verify(program, ["1x4", "2x2"], steps=STEPS, preload=preload)
    assert [(run.verdict, run.causes, run.not_compared) for run in verdict.runs] == [("equivalent", (), ())] * 2, render(
        verdict
    )


@pytest.mark.slow
def test_the_first_commands_of_the_readme_find_a_bug_and_confirm_its_fix(tmp_path: Path) -> None:
    readme = list(blocks(ROOT / "README.md"))
    program = tmp_path / "train.py"
    program.write_text((ROOT / "fixtures" / "tutorial" / "train.py").read_text())
    command = [str(Path(sys.executable).parent / "gpudist"), "verify", "train.py", "--topology", "1x4"]
    assert " ".join(command[1:]) in (ROOT / "README.md").read_text()
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (first.returncode, "1. uneven-batch" in first.stdout) == (1, True), first.stdout + first.stderr

    (diff,) = (block.text for block in readme if block.mark.startswith("diff: fixtures/tutorial/train.py"))
    added, removed, put = re.findall(r"^[+-] (.+)$", diff, re.MULTILINE)
    fixed = (
        program.read_text()
        .replace(removed, put, 1)
        .replace("\nimport tensorflow as tf\n", f"\nimport tensorflow as tf\n{added}\n")
    )
    program.write_text(fixed)
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
