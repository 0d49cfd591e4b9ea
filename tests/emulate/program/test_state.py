"""Lines of a function that change what outlives its call, or return a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.program import lines_that_change_state, lines_that_return

PROGRAM = """
calls, kept = 0, {"n": 0}
class Model:
    def step(self, x):
        self.seen = x
        x.total = 1
        local = [1]
        local[0] = 2
        local.append(3)
        kept["n"] += 1
        kept.update(n=2)
        calls = 5
        return local
def count(x):
    global calls
    calls += 1
    return x
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_attributes_of_self_and_elements_of_globals_are_state_and_what_is_local_is_not(script: Path) -> None:
    assert lines_that_change_state(str(script), 9) == [5, 10, 11]


def test_a_name_that_is_declared_global_is_state(script: Path) -> None:
    assert lines_that_change_state(str(script), 17) == [16]


def test_outside_of_functions_and_in_what_is_no_python_there_is_none(script: Path) -> None:
    assert lines_that_change_state(str(script), 2) == []
    script.write_text("not python (")
    assert lines_that_change_state(str(script), 1) == []
    assert lines_that_change_state(str(script.with_name("gone.py")), 1) == []


RETURNS = """
class Model:
    def train_step(self, data):
        def part(x):
            return x
        if data is None:
            return
        if data is self:
            return {"loss": 0}
        return {"loss": part(data)}
"""


def test_values_are_returned_in_the_last_line_first_and_not_by_a_function_inside(script: Path) -> None:
    script.write_text(RETURNS)
    assert lines_that_return(str(script), 6) == [10, 9]
    assert lines_that_return(str(script), 4) == [5]
    assert lines_that_return(str(script), 2) == lines_that_return(str(script.with_name("gone.py")), 3) == []
