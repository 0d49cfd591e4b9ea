"""Which edits are kept, with verdicts that are made up from the text of the program."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from emulate.errors import UsageError
from emulate.fix import fix, loop
from emulate.program import Program
from emulate.verify import Finding, Reference, Run, Verdict
from emulate.verify.verdict import Location

WRONG = """\
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()


def step(x, model, tape):
    loss = tf.reduce_mean(x)
    loss += tf.add_n(model.losses)
    return strategy.reduce("MEAN", loss, axis=None)
"""
CODES = {
    "loss-scaling": ("loss = tf.reduce_mean(x)", "num_replicas"),
    "regularization-per-replica": ("tf.add_n", "scale_regularization_loss"),
    "loss-report": ('"MEAN"', None),
    "nan": ("no_edit_for_this", None),
}
"""The part of a line that has the cause, and the part that takes it away."""


class Judge:
    """Find the causes of `CODES` in the text that would run, and note how often it was asked."""

    def __init__(self, monkeypatch, *, same_on_one_device=lambda text: True, more=lambda text: (), at=None):
        self.texts, self.topologies, self._at = [], [], at
        self.reference = Reference("ok", 20)
        self._more = more
        monkeypatch.setattr(loop, "verify", self._verify)
        monkeypatch.setattr(loop, "Preload", lambda modules: nullcontext())
        monkeypatch.setattr(
            loop, "changes_of_training", lambda first, last: None if same_on_one_device(self.texts[-1]) else "the optimizers"
        )

    def _verify(self, program, topology, *, traces, preload):
        self.topologies.append(topology)
        text = dict(program.edits).get(program.file, program.file.read_bytes()).decode()
        self.texts.append(text)
        findings = [
            Finding(code, "", "", f"fix of {code}", locations=(Location(str(self._at or program.file), number, line.strip()),))
            for number, line in enumerate(text.splitlines(), 1)
            for code, (wrong, right) in CODES.items()
            if wrong in line and (right is None or right not in line)
        ]
        last = (Location(str(program.file), len(text.splitlines()), ""),)
        findings += [Finding(code, "", "", "", locations=last) for code in self._more(text)]
        run = Run("1x4", "divergent" if findings else "equivalent", causes=tuple(findings))
        return Verdict(program.name, 0, "cpu", {}, self.reference, (run,))


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text=WRONG):
        (tmp_path / "train.py").write_text(text)
        return Program.find("train.py")

    return write


def test_three_causes_are_fixed_one_after_the_other(program, monkeypatch):
    judge = Judge(monkeypatch)
    report = fix(program(), ["1x4"])
    assert [one.code for one in report.fixes] == ["loss-scaling", "regularization-per-replica", "loss-report"]
    assert (report.exit_code, all(one.proven for one in report.fixes), report.not_fixed) == (0, True, ())
    assert report.verifications == len(judge.texts) == 4
    assert report.patch.count("\n-    ") == report.patch.count("\n+    ") == 3
    assert [one["verdict_after"] for one in report.to_json()["fixes"]] == ["divergent", "divergent", "equivalent"]


@pytest.mark.parametrize(("of_findings", "exit_code"), [("train.py", 0), ("env/site-packages/layers.py", 1)])
def test_a_program_among_installed_packages_is_edited_and_packages_in_its_folder_are_not(
    of_findings, exit_code, tmp_path, monkeypatch
):
    folder = tmp_path / "site-packages" / "examples"
    for name in ("train.py", "env/site-packages/layers.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    Judge(monkeypatch, at=folder / of_findings)
    assert fix(Program.find(str(folder / "train.py")), ["1x4"]).exit_code == exit_code


def test_a_right_program_is_left_alone(program, monkeypatch):
    judge = Judge(monkeypatch)
    report = fix(program("import tensorflow as tf\n"), ["1x4"])
    assert (report.exit_code, report.fixes, report.patch, len(judge.texts)) == (0, (), "", 1)


def test_an_edit_that_changes_what_one_device_trains_is_refused(program, monkeypatch):
    Judge(monkeypatch, same_on_one_device=lambda text: "loss = tf.reduce_mean(x) / " not in text)
    report = fix(program(), ["1x4"])
    assert [one.code for one in report.fixes] == ["regularization-per-replica", "loss-report"]
    assert report.exit_code == 1
    [why] = report.not_fixed
    assert why.startswith(
        "No edit for loss-scaling was proven (edit 1: it changes what one device trains: the optimizers; edit 2:"
    )


FIT = """\
import tensorflow as tf

model.compile("sgd", "mse")
model.fit(x, y, batch_size=50)
"""


@pytest.mark.parametrize(
    ("text", "in_order", "is_kept"),
    [
        (FIT, "batch_size=50, shuffle=False)", True),
        (FIT.replace("50", "50, shuffle=flag"), "batch_size=50, shuffle=False)", True),
        (FIT, "never in this text", False),
        (FIT.replace("50", "50, shuffle=False"), "never in this text", False),
    ],
)
def test_an_edit_may_draw_another_order_of_the_examples_if_one_device_trains_the_same_in_order(
    program, monkeypatch, text, in_order, is_kept
):
    judge = Judge(monkeypatch, same_on_one_device=lambda text: "gd.distributed" not in text or in_order in text)
    monkeypatch.setitem(CODES, "uneven-batch", ('model.compile("sgd"', None))
    original = judge._verify

    def verify(program, *args, **options):
        verdict = original(program, *args, **options)
        right = Run("1x4", "equivalent")
        return replace(verdict, runs=(right,)) if "gd.distributed" in judge.texts[-1] else verdict

    monkeypatch.setattr(loop, "verify", verify)
    report = fix(program(text), ["1x4"])
    assert ([one.code for one in report.fixes], report.reorders) == ((["uneven-batch"], True) if is_kept else ([], False))
    ran_in_order = [text for text, topology in zip(judge.texts, judge.topologies, strict=True) if topology == ["1x1"]]
    assert [("gd.distributed" in text, "shuffle=False" in text) for text in ran_in_order] == (
        [(False, True), (True, True)] if "shuffle=False" not in text else []
    )
    assert "shuffle=False" not in report.patch


def test_an_edit_that_brings_another_cause_is_refused(program, monkeypatch):
    Judge(monkeypatch, more=lambda text: ["nan"] if "scale_regularization_loss" in text else [])
    report = fix(program(), ["1x4"])
    assert "scale_regularization_loss" not in report.patch
    assert "tf.add_n(model.losses) / strategy.num_replicas_in_sync" not in report.patch
    assert any(
        "(edit 1: divergent with nan; edit 2: divergent with regularization-per-replica)" in why for why in report.not_fixed
    )


def test_a_report_that_was_right_only_by_what_was_trained_is_mended_after_it(program, monkeypatch):
    """The mean of losses that are divided once more is too small from then on."""
    monkeypatch.setitem(CODES, "loss-report", ("only by more", None))
    Judge(monkeypatch, more=lambda text: ["loss-report"] if "num_replicas" in text and '"MEAN"' in text else [])
    report = fix(program(WRONG.replace("    loss += tf.add_n(model.losses)\n", "")), ["1x4"])
    assert [one.code for one in report.fixes] == ["loss-scaling", "loss-report"]
    assert report.exit_code == 0


def test_a_cause_without_an_edit_is_said_with_its_fix_in_words(program, monkeypatch):
    Judge(monkeypatch)
    report = fix(program("import tensorflow as tf\nno_edit_for_this()\n"), ["1x4"])
    assert report.exit_code == 1
    assert report.not_fixed == ("gpudist has no edit for nan yet; its fix in words: fix of nan",)


def test_a_part_of_a_fix_is_not_called_proven(program, monkeypatch):
    Judge(monkeypatch)
    report = fix(program(WRONG + "\nno_edit_for_this()\n"), ["1x4"])
    assert len(report.fixes) == 3
    assert (report.exit_code, any(one.proven for one in report.fixes)) == (1, False)


def test_a_form_can_be_chosen(program, monkeypatch):
    judge = Judge(monkeypatch)
    report = fix(program(), ["1x4"], form="core")
    assert (report.fixes, len(judge.texts)) == ((), 1)


def test_what_is_no_python_file_is_refused(program):
    with pytest.raises(UsageError, match="gpudist fix edits Python files and notebooks"):
        fix(Program.find(lambda: None), ["1x4"])


def test_the_cell_of_a_notebook_is_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "changes_of_training", lambda first, last: None)
    monkeypatch.setattr(loop, "Preload", lambda modules: nullcontext())
    cells = ["import tensorflow as tf\n", "%time\nloss = tf.reduce_mean(x)"]
    content = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    (tmp_path / "train.ipynb").write_text(json.dumps(content))

    def verify(program, topology, **options):
        text = dict(program.edits).get(Path.cwd() / "train.ipynb", b"").decode()
        finding = Finding("loss-scaling", "", "", "", locations=(Location("train.ipynb", 2, "", cell=2),))
        run = Run("1x4", "equivalent") if "num_replicas" in text else Run("1x4", "divergent", causes=(finding,))
        return Verdict(program.name, 0, "cpu", {}, Reference("ok", 20), (run,))

    monkeypatch.setattr(loop, "verify", verify)
    report = fix(Program.find("train.ipynb"), ["1x4"])
    [edit] = report.fixes
    [texts] = report.files.values()
    assert (edit.place, report.exit_code) == ("train.ipynb, cell 2:2", 0)
    sources = [cell["source"] for cell in json.loads(texts.after)["cells"]]
    divided = "tf.reduce_mean(x) / tf.distribute.get_strategy().num_replicas_in_sync"
    assert sources == [cells[0], f"%time\nloss = {divided}"]


def test_a_program_that_fails_on_one_device_needs_not_train_there_as_before(program, monkeypatch):
    judge = Judge(monkeypatch, same_on_one_device=lambda text: False)
    judge.reference = Reference("failed")
    report = fix(program(), ["1x4"])
    assert (report.exit_code, report.changes_one_device) == (0, True)
