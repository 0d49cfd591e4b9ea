"""A fix suits the program: what is for `fit` comes first there, and nothing is advised that the program does already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emulate.trace import Facts
from emulate.verify import causes
from emulate.verify.causes.cause import _suited


def _case(*, distributed: tuple[str, ...] = (), compiled: bool = True, own_train_step: bool = False) -> Any:
    return SimpleNamespace(facts=Facts(distributed=list(distributed), compiled=compiled, own_train_step=own_train_step))


@pytest.mark.parametrize("heading", ["", "clipnorm", "clipvalue"])
def test_a_program_of_fit_is_told_first_how_fit_stays(heading: str) -> None:
    fix = causes.get("clip-before-reduce").fix(heading)
    lines = _suited(fix, _case()).splitlines()
    assert lines[0].startswith("Use gpudist_core")
    assert "gd.distributed(model)" in lines[0]
    assert lines[1] == "Or, in a training step of your own:"
    assert sorted([*lines[2:], lines[0].replace("Use", "Or use", 1)]) == sorted(fix.splitlines())


def test_a_loop_and_a_train_step_of_one_s_own_are_told_what_to_write_there() -> None:
    fix = causes.get("clip-before-reduce").fix("")
    assert _suited(fix, _case(compiled=False)) == _suited(fix, _case(own_train_step=True)) == fix


def test_an_option_of_keras_that_fixes_it_stays_first() -> None:
    fix = causes.get("batchnorm-local-statistics").fix("")
    assert _suited(fix, _case()) == fix


def test_no_fix_is_given_that_the_program_contains() -> None:
    for cause in causes.all_causes():
        fix = cause.fix("")
        suited = _suited(fix, _case(distributed=("model",)))
        is_fixed_by_core = any("gd.distributed(model)" in line for line in fix.splitlines() if not line.startswith("    "))
        assert suited.startswith("The program has gpudist's own fix for this already") == is_fixed_by_core
        assert not any("gd.distributed(model)" in line for line in suited.splitlines() if not line.startswith("    "))
