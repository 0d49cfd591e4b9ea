"""`make compat`: it goes on where it was stopped, forgets nothing of the manifest, and its table says what did not run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compat import record, table
from benchmarks.compat.__main__ import KERAS_3_TESTS, PLUGIN_TESTS, PROGRAMS
from benchmarks.compat.pairs import PAIRS
from fixtures.manifest import ALSO_ASKED, BUGS, RECIPES
from fixtures.manifest import PROGRAMS as CORRECT
from tests.compat.programs import ITEMS

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"tensorflow": "2.18.1", "keras": "3.8.0", "tf_keras": "2.18.0", "python": "3.10.13", "numpy": "2.0.2"}


def test_every_program_of_the_manifest_is_tried_once() -> None:
    assert len(ITEMS) == len({item.path for item in ITEMS}) == len(CORRECT) + len(BUGS) + 2 * len(RECIPES) + len(ALSO_ASKED)
    assert [path for path in (PROGRAMS, *PLUGIN_TESTS, *KERAS_3_TESTS) if not (ROOT / path).exists()] == []


@pytest.fixture
def go(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run the tests as `make compat` does; which of them ran."""
    file = pytester.path / "record.jsonl"
    pytester.makepyfile(
        "import os, pytest\n\ndef test_right():\n    pass\n\ndef test_wrong():\n    assert os.environ.get('FIXED')\n\n"
        "def test_left_out():\n    pytest.skip('not here')\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed, and they take most of the time

    def run(source: str = "first", keep: str = "0") -> list[str]:
        before = len(file.read_text().splitlines()) if file.exists() else 0
        for name, value in {record.FILE: str(file), record.SOURCE: source, record.KEEP: keep}.items():
            monkeypatch.setenv(name, value)
        pytester.runpytest_subprocess("-p", "benchmarks.compat.record")
        ran = [json.loads(line) for line in file.read_text().splitlines()[before:]]
        assert len(ran[0]["collected"]) == 3
        assert {line["why"] for line in ran[1:] if line["outcome"] == "skipped"} <= {"not here"}  # no path of this machine
        return [line["test"].partition("::")[2] for line in ran[1:]]

    return run


def test_what_passed_is_not_run_again_until_the_sources_change(
    go: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go() == ["test_right", "test_wrong", "test_left_out"]
    assert go() == ["test_wrong"]
    monkeypatch.setenv("FIXED", "1")
    assert go() == ["test_wrong"]
    assert go() == []
    assert go("second", keep="1") == []
    assert go("second") == ["test_right", "test_wrong", "test_left_out"]


def test_the_table_counts_what_passed_and_names_the_rest() -> None:
    tests = {
        f"{PROGRAMS}::says[bugs/a]": {"outcome": "passed", "why": ""},
        f"{PROGRAMS}::says[bugs/b]": {"outcome": "failed", "why": "AssertionError: no\nE   another cause\n"},
        "tests/c": {"outcome": "skipped", "why": "not here"},
        "tests/d": {"outcome": "passed", "why": ""},
    }
    text = table.text({"tf2.18": {"versions": VERSIONS, "collected": 5, "tests": tests}})
    assert "| 2.18.1 | 3.8.0 | 3.10.13 | 1 of 2 | 1 of 1 |" in text
    assert text.splitlines()[-3:] == [
        "- tf2.18: 1 of 5 have not run.",
        "- tf2.18: `bugs/b` failed: E   another cause",
        "- tf2.18: `tests/c` skipped: not here",
    ]


def test_the_table_of_the_documentation_is_that_of_what_ran() -> None:
    assert table.TABLE.read_text() == table.text(table.read())
    assert set(table.read()) <= {name for name, pair in PAIRS.items() if not pair.is_scheduled}
