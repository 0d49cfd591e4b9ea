"""`gpudist demo`: its two programs, its exit codes, the copy of the examples, and that the wheel brings them."""

import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("libcst")

import emulate.fix
import emulate.verify
from emulate.cli.app import app
from emulate.examples import FOLDERS, examples_folder
from emulate.fix import FixReport
from emulate.fix.patch import Edited
from emulate.verify.verdict import Finding, Fix, Reference, Run, Verdict

ROOT = Path(__file__).parents[3]
CAUSE = Finding("loss-scaling", "", "", "")


def demo(*args):
    return CliRunner().invoke(app, ["demo", *args], prog_name="gpudist")


@pytest.fixture
def answers(monkeypatch):
    """The verdicts that the demo's two programs get, instead of a verification."""
    words = {"programs": "equivalent", "bugs": "divergent"}

    def verify(program, topology, **options):
        word = words[Path(program).parent.name]
        runs = tuple(Run(name, word, causes=(CAUSE,) if word == "divergent" else ()) for name in topology)
        return Verdict(str(program), 0, "cpu", {"gpudist": "0"}, Reference("ok", 20), runs)

    def fix(program, topology, **options):
        before = verify(program.file, topology)
        after = replace(before, runs=tuple(Run(name, words["edited"]) for name in topology))
        edit = Fix("loss-scaling", "Divide it.", "train.py:1", "", "plain", after.verdict, proven=True)
        return FixReport(before, after, (edit,), files={program.file: Edited(b"wrong\n", b"right\n")}, verifications=2)

    words["edited"] = "equivalent"
    monkeypatch.setattr(emulate.verify, "verify", verify)
    monkeypatch.setattr(emulate.fix, "fix", fix)
    return words


def test_the_demo_shows_both_verdicts_the_difference_and_what_to_do_next(answers):
    done = demo()
    assert done.exit_code == 0, done.output
    right, wrong = done.stdout.index("programs/multiworker_loop.py"), done.stdout.index("bugs/loss_scaling_multiworker.py")
    assert right < done.stdout.index("loss = tf.reduce_mean(per_example)\n") < wrong
    assert "gpudist verify train.py --topology 1x4 --topology 2x2" in done.stdout


def test_the_demo_ends_with_the_diff_and_its_proof(answers):
    done = demo()
    assert "-wrong\n+right\n" in done.stdout
    assert "Proven: 1x4 equivalent, 2x2 equivalent with this edit (before: 1x4 divergent, 2x2 divergent)." in done.stdout


def test_without_libcst_the_demo_verifies_the_wrong_program_alone(answers, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "libcst" else find(name, *rest))
    done = demo()
    assert (done.exit_code, "Proven" in done.stdout) == (0, False)


@pytest.mark.parametrize(
    ("folder", "word", "code"),
    [
        ("programs", "divergent", 70),
        ("bugs", "equivalent", 70),
        ("programs", "unavailable", 5),
        ("bugs", "hung", 4),
        ("edited", "divergent", 70),
    ],
)
def test_a_verdict_that_the_demo_does_not_expect_fails_it(answers, folder, word, code):
    answers[folder] = word
    done = demo()
    assert done.exit_code == code
    assert "Received: exit code" in done.stderr


def test_without_tensorflow_the_demo_says_at_once_what_to_install(answers, monkeypatch):
    monkeypatch.setattr("emulate.devices.machine.unsupported", lambda **_: "TensorFlow must be installed")
    done = demo()
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", "gpudist: TensorFlow must be installed\n")


def test_the_copied_examples_are_complete_and_a_folder_that_exists_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "examples/bugs/loss_scaling_multiworker.py" in demo("--copy", "examples").stdout
    copied = {path.relative_to("examples") for path in Path("examples").rglob("*")}
    assert {Path("data/digits.npz"), Path("programs/multiworker_loop.py")} <= copied
    done = demo("--copy", "examples")
    assert done.exit_code == 2
    assert "--copy must name a new folder. Received: --copy 'examples', which exists. Name another folder." in done.stderr


def test_the_wheel_has_every_example(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("emulate/examples/")}
    files = [path for name in FOLDERS for path in (examples_folder() / name).rglob("*") if path.is_file()]
    expected = {f"emulate/examples/{path.relative_to(examples_folder())}" for path in files if path.suffix != ".pyc"}
    assert packed == expected | {"emulate/examples/__init__.py"}
