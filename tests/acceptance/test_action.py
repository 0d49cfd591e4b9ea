"""The GitHub Action: the commands of action.yml, run as a runner runs them, and what they tell GitHub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from emulate.verify.verdict import Finding, Fix, Reference, Run, Verdict

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
BASH = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c")  # what `shell: bash` means

# Stands in for gpudist and for pip: says how it was called, writes the verdict and prints the report that a test asks for.
STAND_IN = """#!{python}
import os, sys
with open("called", "a") as file:
    print(*sys.argv[1:], sep="|", file=file)
if os.environ.get("VERDICT"):
    open(sys.argv[sys.argv.index("--json") + 1], "w").write(os.environ["VERDICT"])
print("the report")
sys.exit(int(os.environ.get("CODE", 0)))
"""
SCALING = Finding("loss-scaling", "4x too large: 100%", "4.0", "Divide by the\nglobal batch.")
BY_DESIGN = Finding("identical-dropout", "Same masks.", "", "Seed it.", by_design=True)


@dataclass
class Step:
    """One finished step of the action, and the files it wrote for GitHub."""

    done: subprocess.CompletedProcess[str]
    summary: str
    output: str

    @property
    def annotations(self) -> list[str]:
        """The workflow commands in its log."""
        return re.findall(r"^::.*$", self.done.stdout, re.MULTILINE)


def run_step(name: str, folder: Path, inputs: dict[str, str], **environment: str) -> Step:
    """Run a step of action.yml with its defaults, as GitHub's runner does."""
    [step] = [step for step in ACTION["runs"]["steps"] if step.get("name") == name]
    given = {key: inputs.get(key, about.get("default", "")) for key, about in ACTION["inputs"].items()}
    own = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text) for key, text in step["env"].items()
    }
    files = {name: folder / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    settings = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_WORKSPACE": str(folder),
        "RUNNER_TEMP": str(folder),
        **{name: str(file) for name, file in files.items()},
        **own,
        **environment,
    }
    done = subprocess.run(
        [*BASH, step["run"]], cwd=folder, env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    return Step(done, *(file.read_text() if file.exists() else "" for file in files.values()))


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], Path]:
    """Make a program of this name, which only says how it was called."""

    def make(name: str) -> Path:
        (tmp_path / name).write_text(STAND_IN.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


def verdict_of(*runs: Run, strict: bool = False, **location: Any) -> str:
    """The JSON of a verdict; its first cause has this location."""
    content = Verdict("train.py", 0, "cpu", {"gpudist": "0"}, Reference("ok", 20), runs, strict=strict).to_json()
    if location:
        for run in content["runs"]:
            run["causes"][0]["location"] = location
    return json.dumps(content)


def test_inputs_become_options_and_arguments_of_the_program(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in("gpudist")
    inputs = {
        "program": "-m package.train",
        "topologies": "1x4 2x2",
        "steps": "all",
        "allow": "identical-dropout loss-report",
        "strict": "true",
        "args": "--name 'a b'",
        "options": "--timeout 600",
    }
    step = run_step("Verify", folder, inputs, VERDICT=verdict_of(Run("1x4", "equivalent")))
    assert step.done.returncode == 0, step.done.stderr
    file = folder / "gpudist-verdict.json"
    assert (folder / "called").read_text() == (
        "verify|-m|package.train|--topology|1x4|--topology|2x2|--steps|all|--allow|identical-dropout|--allow|loss-report|"
        f"--strict|--timeout|600|--json|{file}|--|--name|a b\n"
    )
    assert step.output == f"exit-code=0\njson={file}\n"
    assert step.annotations == []


def test_a_cause_is_one_annotation_at_its_line_and_fails_the_job(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in("gpudist")
    runs = [Run(name, "divergent", causes=(SCALING,)) for name in ("1x4", "2x2")]
    verdict = verdict_of(*runs, file=str(folder / "sub" / "train.py"), line=63)
    step = run_step("Verify", folder, {"program": "sub/train.py"}, VERDICT=verdict, CODE="1")
    assert step.done.returncode == 1
    where = "file=sub/train.py,line=63,title=gpudist%3A loss-scaling (1x4%2C 2x2)"
    assert step.annotations == [f"::error {where}::4x too large: 100%25%0AFix: Divide by the%0Aglobal batch."]
    assert step.summary == "### gpudist: 1x4 divergent, 2x2 divergent\n\n````text\nthe report\n````\n"
    assert "exit-code=1\n" in step.output


def test_a_proven_edit_is_a_notice_at_its_line_and_a_diff_in_the_summary(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in("gpudist")
    patch = "--- a/sub/train.py\n+++ b/sub/train.py\n@@ -63 +63 @@\n-loss\n+loss / 4\n"
    edit = Fix("loss-scaling", "Divide it.", "train.py:63", patch, "plain", "equivalent", proven=True)
    content = json.loads(verdict_of(Run("1x4", "divergent", causes=(SCALING,))))
    content |= {"fixes": [vars(edit)], "patch": patch}
    step = run_step("Verify", folder, {"program": "sub/train.py", "fix": "true"}, VERDICT=json.dumps(content), CODE="1")
    assert "|--fix|" in (folder / "called").read_text()
    notice = step.annotations[-1]
    assert notice.startswith("::notice file=sub/train.py,line=63,title=gpudist%3A edit for loss-scaling%2C proven together")
    assert notice.endswith("-loss%0A+loss / 4%0A")
    assert step.summary.endswith(f"````diff\n{patch}````\n")


@pytest.mark.parametrize(
    ("run", "strict", "level"),
    [
        (Run("1x4", "by-design", causes=(BY_DESIGN,)), False, "warning"),
        (Run("1x4", "by-design", causes=(BY_DESIGN,)), True, "error"),
        (Run("1x4", "divergent", causes=(SCALING,)), False, "error"),
        (Run("1x4", "equivalent", causes=(Finding("nan", "", "", "", allowed=True),)), True, "notice"),
        (Run("1x4", "equivalent", causes=(Finding("nan", "", "", "", advice=True),)), True, "notice"),
        (Run("1x4", "failed", failure="ValueError: no data"), False, "error"),
    ],
)
def test_the_level_of_an_annotation_says_whether_it_fails_the_job(
    stand_in: Callable[[str], Path], run: Run, strict: bool, level: str
) -> None:
    step = run_step("Verify", stand_in("gpudist"), {"program": "train.py"}, VERDICT=verdict_of(run, strict=strict))
    assert [line.partition(" ")[0] for line in step.annotations] == [f"::{level}"]


def test_a_cause_in_a_notebook_is_annotated_at_the_file(stand_in: Callable[[str], Path]) -> None:
    folder = stand_in("gpudist")
    run = Run("1x4", "divergent", causes=(SCALING,))
    verdict = verdict_of(run, file=str(folder / "train.ipynb"), line=3, cell=2)
    step = run_step("Verify", folder, {"program": "train.ipynb"}, VERDICT=verdict, CODE="1")
    assert step.annotations[0].startswith("::error file=train.ipynb,title=")


def test_no_verdict_is_an_error(stand_in: Callable[[str], Path]) -> None:
    step = run_step("Verify", stand_in("gpudist"), {"program": "no.py"}, CODE="2")
    assert step.done.returncode == 2
    assert "::gpudist ended with exit code 2. The log of this step says why." in step.annotations[0]
    assert step.output == "exit-code=2\njson=\n"


def test_strict_that_is_no_boolean_is_a_usage_error(stand_in: Callable[[str], Path]) -> None:
    step = run_step("Verify", stand_in("gpudist"), {"program": "train.py", "strict": "yes"})
    assert step.done.returncode == 2
    assert "strict must be true or false. Received: strict='yes'." in step.annotations[0]


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ({}, f"{ROOT}[tensorflow]"),
        ({"version": "0.2.0"}, "gpudist[tensorflow]==0.2.0"),
        ({"extras": "", "install": "-r 'my requirements.txt'"}, f"{ROOT}|-r|my requirements.txt"),
    ],
)
def test_what_is_installed(tmp_path: Path, inputs: dict[str, str], wanted: str) -> None:
    """A `pip` in the working directory stands before the real one for `python -m pip`."""
    (tmp_path / "pip.py").write_text(STAND_IN)
    step = run_step("Install gpudist", tmp_path, inputs, PYTHONPATH=str(tmp_path))
    assert step.done.returncode == 0, step.done.stderr
    assert (tmp_path / "called").read_text() == f"install|{wanted}\n"


@pytest.mark.slow
def test_a_wrong_program_fails_the_job_for_real(tmp_path: Path) -> None:
    inputs = {"program": str(ROOT / "fixtures/bugs/loss_scaling.py"), "topologies": "1x2", "steps": "2"}
    step = run_step("Verify", tmp_path, inputs, PYTHONPATH=str(ROOT))
    assert step.done.returncode == 1, step.done.stderr
    assert any("loss-scaling (1x2)" in line for line in step.annotations)
    assert "1. loss-scaling" in step.summary
