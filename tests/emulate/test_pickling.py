"""What another process gets of a value: code by value, and with the name of its file."""

import pickle
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import pytest

from emulate.pickling import to_bytes

SOURCE = """
import numpy as np

class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return [self.factor * part for part in (lambda: value)()]

def outer(value):
    def inner():
        raise ValueError("from the program")
    if value is None:
        inner()
    return Scale(2)(value)
"""


@pytest.fixture
def program(tmp_path: Path) -> ModuleType:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    module = ModuleType("__main__")  # what cannot be imported in another process goes by value
    exec(compile(SOURCE, str(file), "exec"), vars(module))
    return module


def code_of(value: Any) -> list[CodeType]:
    code: CodeType = value.__code__
    found, waiting = [], [code]
    while waiting:
        found.append(waiting.pop())
        waiting += [const for const in found[-1].co_consts if isinstance(const, CodeType)]
    return found


def test_code_that_is_sent_keeps_the_name_and_the_lines_of_its_file(program: ModuleType) -> None:
    sent = pickle.loads(to_bytes(program.outer))
    assert sent is not program.outer
    assert sent([1, 2]) == [2, 4]
    method = sent.__globals__["Scale"].__call__
    for mine, theirs in ((program.outer, sent), (program.Scale.__call__, method)):
        ours, others = code_of(mine), code_of(theirs)
        assert len(ours) > 1
        assert [(code.co_filename, code.co_name, list(code.co_lines())) for code in others] == [
            (code.co_filename, code.co_name, list(code.co_lines())) for code in ours
        ]
    with pytest.raises(ValueError, match="from the program") as raised:
        sent(None)
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__)[-2:]]
    assert lines == ["inner()", 'raise ValueError("from the program")']


def test_what_is_sent_arrives_in_a_process_that_has_not_imported_cloudpickle(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(to_bytes((program.outer, [3])))
    read = "import pickle, sys; f, x = pickle.load(open(sys.argv[1], 'rb')); print(f(x), f.__code__.co_filename)"
    done = subprocess.run([sys.executable, "-c", read, str(tmp_path / "sent")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[6]", str(tmp_path / "train.py")]


def test_modules_registered_with_cloudpickle_go_by_value() -> None:
    this = sys.modules[__name__]
    assert pickle.loads(to_bytes(code_of)) is code_of
    cloudpickle.register_pickle_by_value(this)
    try:
        assert pickle.loads(to_bytes(code_of)) is not code_of
    finally:
        cloudpickle.unregister_pickle_by_value(this)


def test_what_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        to_bytes(threading.Lock())
