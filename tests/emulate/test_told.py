"""The sentences of a verdict: each keeps its code, and the documentation lists every code."""

import ast
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import ValidationError

from emulate.told import Told, told
from emulate.verify.verdict import Reference, Run, Verdict

ROOT = Path(__file__).parents[2]
NOTES = {"note", "note_once", "_note"}
"""What tells of a host, beside `told`."""


def codes_of(file):
    for call in ast.walk(ast.parse(file.read_text())):
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
            continue
        called = ast.unparse(call.func)
        is_note = called.rpartition(".")[2] in NOTES and len(call.args) == 2 and not called.endswith("facts.note")
        if called == "told" or is_note:
            yield call.args[0].value


def test_the_documentation_lists_every_code():
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    table = text.partition("| what the sentence is about |")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    made = {code for file in (ROOT / "emulate").rglob("*.py") for code in codes_of(file)}
    assert len(made) > 50
    assert listed == sorted(made)


def test_a_sentence_keeps_its_code():
    sentence = told("kinks")("from step {} on")
    filled = sentence.format(3)
    assert (filled, filled.code) == ("from step 3 on", "kinks")
    assert [text.code for text in dict.fromkeys([filled, told("other")("from step 3 on")])] == ["kinks"]
    assert pickle.loads(pickle.dumps(filled)).code == "kinks"
    assert type(pickle.loads(pickle.dumps(filled))) is Told


def test_a_run_has_the_codes_of_its_sentences_in_their_order():
    run = Run("1x4", "equivalent", notes=(told("one")("same"), told("two")("other")))
    assert (run.note_codes, run.not_compared_codes) == (("one", "two"), ())
    run = replace(run, notes=run.notes[1:], not_compared=(told("three")("more"),))
    assert (run.note_codes, run.not_compared_codes) == (("two",), ("three",))


def test_a_sentence_of_gpudist_without_a_code_fails_the_tests():
    run = Run("1x4", "equivalent", notes=("plain",))  # mypy refuses it in emulate/
    assert run.note_codes == ("",)
    with pytest.raises(ValidationError, match="does not match"):
        Verdict("train.py", 0, "cpu", {}, Reference("ok", 20), (run,))
