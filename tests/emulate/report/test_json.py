"""`--json`: one strict object with every key of the contract, whole or not there."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from emulate.errors import Unavailable, UsageError
from emulate.report import check_writable, write_json
from emulate.verify.verdict import Difference, Location, Reference, StepGraph

CAUSE = {
    "code": "loss-scaling", "summary": "...", "evidence": "...", "fix": "...", "fixes": [""], "by_design": False,
    "allowed": False, "stage": "loss", "location": {"file": "train.py", "line": 63, "text": "...", "cell": None},
    "locations": [{"file": "train.py", "line": 63, "text": "...", "cell": None}], "url": "...",
}  # fmt: skip
FIRST = {
    "tensor": "dense/kernel", "kind": "gradient", "step": 3, "replica": None, "host": None, "optimizer": "adam",
    "value": 0.5, "reference_value": 0.125, "error": 0.375, "noise": 1e-07, "non_finite": False,
}  # fmt: skip
RUN = {
    "topology": "1x4", "verdict": "equivalent", "reason": None, "replicas": 4, "steps": 20, "all_reduce": "one-device",
    "samples": {"reference": 1280, "seen": 1280, "missing": 0, "repeated": 0},
    "worst": {"tensor": "dense/kernel", "kind": "gradient", "step": 3, "error": 1.2e-07, "noise": 0.9e-07},
    "step_graph": {"text": "...", "same_on_replicas": True, "depends_on_number": False, "locations": [CAUSE["location"]]},
    "first_divergence": FIRST, "causes": [CAUSE], "not_compared": ["..."], "notes": ["..."], "seconds": 8.1,
    "not_compared_codes": ["..."], "note_codes": ["..."],
}  # fmt: skip
CONTRACT = {
    "schema": "gpudist.verdict/1", "program": "...", "seed": 0, "device": "cpu",
    "versions": {"gpudist": "...", "tensorflow": "...", "keras": "..."}, "program_starts": 3, "evaluations": 2,
    "reference": {"status": "ok", "steps": 20, "repeatable": True}, "runs": [RUN], "notes": ["..."], "note_codes": ["..."],
}  # fmt: skip


def has_shape_of(value, wanted):
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(key in value and has_shape_of(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and bool(value) and all(has_shape_of(item, wanted[0]) for item in value)
    return wanted is None or value is None or isinstance(value, type(wanted))


def refuse(text):
    raise AssertionError(f"not strict JSON: {text}")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_every_key_of_the_contract_is_there(made, tmp_path):
    located = replace(made.loss_scaling, stage="loss", fixes=("",), locations=(Location("train.py", 63, "loss = 1"),))
    step = StepGraph("...", same_on_replicas=True, depends_on_number=False, locations=located.locations)
    verdict = made.verdict(made.divergent(causes=[located], notes=("a",), not_compared=("b",), step_graph=step), notes=("c",))
    write_json(verdict, tmp_path / "v.json")
    assert has_shape_of(read(tmp_path / "v.json"), CONTRACT)


def test_the_file_says_what_the_verdict_says(made, tmp_path):
    verdict = made.verdict(made.equivalent("1x4"), made.divergent("2x2"), reference=Reference("ok", 20, repeatable=False))
    write_json(verdict, tmp_path / "v.json")
    assert read(tmp_path / "v.json") == verdict.to_json()
    assert [run["verdict"] for run in read(tmp_path / "v.json")["runs"]] == ["equivalent", "divergent"]


def test_a_number_that_is_not_finite_is_null(made, tmp_path):
    first = Difference("loss", "loss", 0, float("inf"), float("nan"), value=float("nan"), non_finite=True)
    write_json(made.verdict(made.divergent(first=first)), tmp_path / "v.json")
    written = read(tmp_path / "v.json")["runs"][0]["first_divergence"]
    assert (written["error"], written["noise"], written["value"], written["non_finite"]) == (None, None, None, True)


def test_an_earlier_file_is_replaced_and_nothing_else_is_left(made, tmp_path):
    path = tmp_path / "v.json"
    write_json(made.verdict(made.divergent()), path)
    path.chmod(0o640)
    old = path.read_text()
    check_writable(path, "--json")
    assert path.read_text() == old
    write_json(made.verdict(made.equivalent()), path)
    assert os.listdir(tmp_path) == ["v.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_other(made, tmp_path):
    (tmp_path / "plain").touch()
    write_json(made.verdict(made.equivalent()), tmp_path / "v.json")
    assert (tmp_path / "v.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_earlier_file(made, tmp_path, monkeypatch):
    path = tmp_path / "v.json"
    path.write_text("old")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        Unavailable, match=r"must find room in its file\. Received: file='.*v\.json' \(No space left on device\)"
    ):
        write_json(made.verdict(made.equivalent()), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["v.json"]


def test_a_pipe_is_written_not_replaced(made, tmp_path):
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    check_writable(link, "--json")
    write_json(made.verdict(made.equivalent()), link)
    assert link.is_symlink()


@pytest.mark.parametrize(
    "text", ["import keras\n", "{}", '{"format": "gpudist.trace/1"}', "[]", "<!DOCTYPE html>\n", "\n", "\xff"]
)
def test_a_file_that_is_no_report_is_not_written_over(tmp_path, text):
    path = tmp_path / "mine"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(
        UsageError, match=r"--json must name a new file or an earlier report\. Received: --json '.*mine', which has"
    ):
        check_writable(path, "--json")
    assert path.read_text(encoding="latin-1") == text


def test_an_empty_file_is_written(tmp_path):
    (tmp_path / "v.json").touch()
    check_writable(tmp_path / "v.json", "--json")


def test_a_queue_that_somebody_reads_is_written(made, tmp_path):
    os.mkfifo(tmp_path / "queue")
    check_writable(tmp_path / "queue", "--json")
    reader = os.open(tmp_path / "queue", os.O_RDONLY | os.O_NONBLOCK)
    write_json(made.verdict(made.equivalent()), tmp_path / "queue")
    assert os.read(reader, 1 << 16).startswith(b"{")
    os.close(reader)


def test_an_open_file_is_written_behind_what_it_has(made, tmp_path):
    with open(tmp_path / "log", "w+") as log:
        log.write("before\n")
        log.flush()
        write_json(made.verdict(made.equivalent()), Path(f"/proc/self/fd/{log.fileno()}"))
    assert (tmp_path / "log").read_text().startswith("before\n{")


def test_checking_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "v.json", "--json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"--json must name a file\. Received: --json '.*', which is a folder\. Name a file in it\."),
        (
            "no/v.json",
            r"--json must name a file that can be written\. Received: --json '.*/no/v\.json' \(No such file or directory\)",
        ),
        (
            "file/v.json",
            r"Received: --json '.*/file/v\.json' \(Not a directory\)\. Name one in a folder that exists and is yours\.",
        ),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before(tmp_path, name, message):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=message):
        check_writable(tmp_path / name, "--json")
