"""A program that sets what TensorFlow reads at import runs in a process in which that was set in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulate.cluster import Preload
from emulate.program import Program
from emulate.progress import Silent
from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE
from emulate.verify.processes import Parents
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings

LEGACY = "import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
SEEN = """
import sys
was_there = "tensorflow" in sys.modules
import tensorflow as tf
print("told", was_there, tf.keras.Sequential.__module__)
"""


@pytest.fixture
def parents(preload: Preload) -> Iterator[Parents]:
    made = Parents(preload, ())
    yield made
    made.close()


def test_one_late_setting_is_made_before_the_import_and_a_second_one_by_the_program_alone(parents: Parents) -> None:
    first = parents.current
    parents.replace(first, "TF_USE_LEGACY_KERAS", "1")
    second = parents.current
    assert second is not first
    assert second.imports
    parents.replace(first, "TF_USE_LEGACY_KERAS", "1")  # another run that came from the first one
    assert parents.current is second
    parents.replace(second, "TF_ENABLE_ONEDNN_OPTS", "0")
    assert parents.current is parents.bare
    assert not parents.current.imports


def test_a_variable_that_is_removed_needs_a_process_without_the_import(parents: Parents) -> None:
    parents.replace(parents.current, "TF_USE_LEGACY_KERAS", None)
    assert parents.current is parents.bare


def test_what_was_made_is_closed_and_what_is_shared_stays(preload: Preload) -> None:
    made = Parents(preload, ())
    bare = made.bare
    folder = bare.directory
    made.close()
    assert not folder.exists()
    assert preload.directory.exists()


@pytest.mark.parametrize(
    ("settings", "was_there"),
    [
        ("", True),
        (LEGACY, True),
        (LEGACY + "os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\n", False),
    ],
    ids=["none", "one", "two"],
)
def test_later_runs_find_tensorflow_imported_with_what_the_program_sets(
    tmp_path: Path, preload: Preload, settings: str, was_there: bool
) -> None:
    (tmp_path / "train.py").write_text(settings + SEEN)
    program = Program.find(tmp_path / "train.py")
    with Runner(Settings(program, timeout=120), tmp_path / "runs", Silent(), preload=preload) as runner:
        for label in ("first", "second"):
            result = runner.start(label, REFERENCE, ProbePlan(tmp_path), reference=True).result()
            assert result.status == "ok", result.failure
    printed = [(tmp_path / "runs" / label / "host-0" / "stdout").read_text() for label in ("first", "second")]
    told = [line.split() for text in printed for line in text.splitlines() if line.startswith("told")]
    assert [seen for _, seen, _ in told] == [str(was_there)] * 2
    assert all(module.startswith("tf_keras") is bool(settings) for *_, module in told)
