"""What a wrapper of gpudist's own raises never reaches the program, and what the program raises always does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulate import point

Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Iterator[Told]:
    """What is told of gpudist's own errors; afterwards nobody listens."""
    seen: Told = []
    point.listen(lambda at, error: seen.append((at, str(error))))
    yield seen
    point._listeners.clear()


def _wrapped(wrapper: point.Wrapper, calls: list[int]) -> Any:
    def double(number: int) -> int:
        calls.append(number)
        if number < 0:
            raise ValueError("of the program")
        return 2 * number

    owner = SimpleNamespace(__name__="library.module", double=double)
    point.around(owner, "double")(wrapper)
    return owner.double


def _fails_before(original: Any, number: int) -> int:
    raise TypeError("of gpudist")


def _fails_after(original: Any, number: int) -> int:
    original(number)
    raise TypeError("of gpudist")


def _fails_while_the_programs_error_passes(original: Any, number: int) -> int:
    try:
        return int(original(number))
    finally:
        raise TypeError("of gpudist")


@pytest.mark.parametrize("wrapper", [_fails_before, _fails_after, _fails_while_the_programs_error_passes])
def test_a_call_is_made_once_and_an_error_of_its_wrapper_is_told_once(wrapper: point.Wrapper, told: Told) -> None:
    calls: list[int] = []
    double = _wrapped(wrapper, calls)
    assert [double(1), double(2)] == [2, 4]
    assert (calls, told) == ([1, 2], [("module.double", "of gpudist")])


@pytest.mark.parametrize("wrapper", [_fails_before, _fails_after, _fails_while_the_programs_error_passes])
def test_the_programs_own_error_passes(wrapper: point.Wrapper, told: Told) -> None:
    with pytest.raises(ValueError, match="of the program"):
        _wrapped(wrapper, [])(-1)


def test_without_a_listener_an_error_passes() -> None:
    with pytest.raises(TypeError, match="of gpudist"):
        _wrapped(_fails_before, [])(1)


def test_an_import_is_not_disturbed_by_what_is_done_after_it(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_the_program.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fail() -> None:
        raise TypeError("of gpudist")

    point.when_imported("module_of_the_program", fail)
    assert importlib.import_module("module_of_the_program").VALUE == 3
    assert told == [("import module_of_the_program", "of gpudist")]
