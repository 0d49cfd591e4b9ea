"""Something runs right after a module has been imported, however a program comes to import it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from emulate.imports import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_actions_run_once_and_in_order_after_the_import(module: str) -> None:
    seen: list[str] = []
    when_imported(module, lambda: seen.append("first"))
    when_imported(module, lambda: seen.append("second"))
    assert not seen
    imported = importlib.import_module(module)
    importlib.reload(imported)
    assert seen == ["first", "second"]


def test_the_action_sees_the_finished_module(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    importlib.import_module(module)
    assert seen == [1]


def test_looking_for_the_module_without_importing_it_loses_nothing(module: str) -> None:
    seen: list[str] = []
    when_imported(module, lambda: seen.append("imported"))
    assert importlib.util.find_spec(module) is not None
    importlib.import_module(module)
    assert seen == ["imported"]


def test_an_imported_module_is_as_if_nobody_had_watched(module: str) -> None:
    when_imported(module, lambda: None)
    imported = importlib.import_module(module)
    assert type(imported.__loader__).__module__ == "_frozen_importlib_external"
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__


def test_a_module_imported_before_is_acted_on_at_once() -> None:
    seen: list[str] = []
    when_imported("importlib", lambda: seen.append("now"))
    assert seen == ["now"]


def test_an_action_that_is_added_while_the_module_is_imported_runs(module: str, tmp_path: Path) -> None:
    """`import keras` imports TensorFlow, and what is then done to TensorFlow waits for the end of Keras."""
    (tmp_path / "imported_later.py").write_text("import imported_inside\nvalue = 1\n")
    (tmp_path / "imported_inside.py").write_text("")
    seen: list[int] = []
    when_imported(module, lambda: None)
    when_imported("imported_inside", lambda: when_imported(module, lambda: seen.append(sys.modules[module].value)))
    importlib.import_module(module)
    sys.modules.pop("imported_inside")
    assert seen == [1]
    assert not [finder for finder in sys.meta_path if getattr(finder, "name", None) == module]
