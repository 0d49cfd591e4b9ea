"""`gpudist fix`: what it prints, writes and refuses, with verdicts that are made up from the text of the program."""

import importlib.util
import json
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

pytest.importorskip("libcst")

from emulate.cli.app import app
from emulate.fix import loop
from emulate.verify import Finding, Reference, Run, Verdict
from emulate.verify.verdict import Location

WRONG = b"import tensorflow as tf\r\n\r\n\r\ndef step(x):\r\n\treturn tf.reduce_mean(x)  # per replica\r\n"
RIGHT = WRONG.replace(b"(x)  #", b"(x) / tf.distribute.get_strategy().num_replicas_in_sync  #")


def gpudist(*args):
    return CliRunner().invoke(app, ["fix", *args], prog_name="gpudist")


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "changes_of_training", lambda first, last: None)
    file = tmp_path / "train.py"
    file.write_bytes(WRONG)

    def verify(program, topology, **options):
        text = dict(program.edits).get(program.file, program.file.read_bytes())
        finding = Finding("loss-scaling", "too large", "4.0", "divide", locations=(Location("train.py", 5, ""),))
        run = Run("1x4", "equivalent") if b"num_replicas" in text else Run("1x4", "divergent", causes=(finding,))
        return Verdict(program.name, 0, "cpu", {}, Reference("ok", 20), (run,))

    monkeypatch.setattr(loop, "verify", verify)
    monkeypatch.setattr(loop, "Preload", lambda modules: nullcontext())
    return file


def test_it_shows_the_diff_and_its_proof_and_changes_nothing(program):
    done = gpudist("train.py")
    assert done.exit_code == 0, done.output
    assert "--- a/train.py\n+++ b/train.py\n" in done.output.replace("\r", "")
    assert "Proven: 1x4 equivalent with this edit (before: 1x4 divergent)." in done.output
    assert program.read_bytes() == WRONG
    assert [path.name for path in program.parent.iterdir()] == ["train.py"]


def test_it_writes_the_program_the_patch_and_json(program):
    done = gpudist("train.py", "--write", "--patch", "fix.diff", "--json", "fix.json")
    assert done.exit_code == 0, done.output
    assert program.read_bytes() == RIGHT
    assert program.with_name("train.py.orig").read_bytes() == WRONG
    written = json.loads(program.with_name("fix.json").read_text())
    [one] = written["fixes"]
    assert (written["schema"], written["exit_code"]) == ("gpudist.fix/1", 0)
    assert (one["code"], one["proven"], one["verdict_after"]) == ("loss-scaling", True, "equivalent")
    assert program.with_name("fix.diff").read_bytes().decode() == one["patch"]
    assert "Nothing to fix" in gpudist("train.py").output


def test_nothing_is_written_without_a_proof(program, monkeypatch):
    monkeypatch.setattr(loop, "changes_of_training", lambda first, last: "the optimizers")
    done = gpudist("train.py", "--write", "--patch", "fix.diff")
    assert done.exit_code == 1
    assert "No edit for loss-scaling was proven (edit 1: it changes what one device trains: the optimizers)" in done.output
    assert [path.name for path in program.parent.iterdir()] == ["train.py"]
    assert program.read_bytes() == WRONG


def test_without_libcst_it_says_what_to_install(program, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "libcst" else find(name, *rest))
    done = gpudist("train.py")
    assert done.exit_code == 2
    assert 'gpudist fix needs LibCST. Received: libcst not installed. Install it: pip install "gpudist[fix]".' in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--with", "magic"], "--with must be core or plain. Received: --with 'magic'."),
        (["--patch", "train.py"], "--patch must name a new file, or an earlier patch. Received: --patch 'train.py'"),
        (["--patch", "no/fix.diff"], "--patch must name a file in a folder that exists. Received: --patch 'no/fix.diff'"),
    ],
)
def test_usage_errors_say_what_must_hold(program, args, message):
    done = gpudist("train.py", *args)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_syntax_error_is_a_usage_error(program):
    program.write_bytes(b"def f(:\n")
    done = gpudist("train.py", "--write")
    assert done.exit_code == 2
    assert "A program must be valid Python" in done.output
    assert program.read_bytes() == b"def f(:\n"


def verify_with_fix(*args):
    return CliRunner().invoke(app, ["verify", "train.py", "--fix", *args], prog_name="gpudist")


def test_verify_adds_proven_edits_to_its_reports_and_keeps_its_exit_code(program):
    done = verify_with_fix("--json", "verdict.json", "--sarif", "verdict.sarif", "--html", "verdict.html")
    assert done.exit_code == 1, done.output
    assert "Proven: 1x4 equivalent with this edit" in done.output
    written = json.loads(program.with_name("verdict.json").read_text())
    assert (written["verdict"], written["fixes"][0]["code"]) == ("divergent", "loss-scaling")
    assert written["patch"] == written["fixes"][0]["patch"]
    assert 'class="added">+' in program.with_name("verdict.html").read_text()
    [result] = json.loads(program.with_name("verdict.sarif").read_text())["runs"][0]["results"]
    [change] = result["fixes"][0]["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "train.py"}
    lines, text = WRONG.decode().split("\n"), ""
    for one in change["replacements"]:
        region = one["deletedRegion"]
        text = "\n".join([*lines[: region["startLine"] - 1], one["insertedContent"]["text"], *lines[region["endLine"] :]])
    assert text == RIGHT.decode()
    assert program.read_bytes() == WRONG


def test_verify_says_which_cause_has_no_proven_edit(program, monkeypatch):
    monkeypatch.setattr(loop, "changes_of_training", lambda first, last: "the optimizers")
    done = verify_with_fix("--json", "verdict.json")
    written = json.loads(program.with_name("verdict.json").read_text())
    assert (done.exit_code, written["fixes"], written["patch"]) == (1, [], "")
    assert written["note_codes"] == ["not-fixed"]
    assert "(edit 1: it changes what one device trains: the optimizers)." in written["notes"][0]


@pytest.mark.parametrize("option", ["--traces", "--certificate"])
def test_verify_with_fix_refuses_files_of_each_verification(program, option):
    done = verify_with_fix(option, "there")
    assert done.exit_code == 2
    assert f"--fix must stand without {option}. Received: {option} 'there'. Leave one of them out." in done.output
    assert not program.with_name("there").exists()
