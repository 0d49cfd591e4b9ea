"""What is said of an error that does not say itself how the program should have been started, or what to install."""

from pathlib import Path

import pytest

import gpudist_core
from emulate.program import hint_for

RELATIVE = "ImportError: attempted relative import with no known parent package"


def failure(*files, error=RELATIVE):
    frames = "".join(f'  File "{file}", line 1, in <module>\n    from .rows import rows\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}{error}"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "package" / "sub"
    folder.mkdir(parents=True)
    return folder / "train.py"


def test_a_file_of_a_package_is_started_as_its_module(file, monkeypatch):
    (file.parent / "__init__.py").touch()
    (file.parent.parent / "__init__.py").touch()
    said = "A file that imports from its own package is started as a module of it: -m package.sub.train"
    assert hint_for(failure(file)) == said
    monkeypatch.chdir(file.parent)
    assert hint_for(failure(file)) == f"{said}, in the folder {file.parents[2]}"


def test_a_package_needs_no_file_of_its_own(file, monkeypatch):
    assert hint_for(failure(file)).endswith(": -m package.sub.train")
    monkeypatch.chdir(file.parent)
    assert hint_for(failure(file)).endswith(f": -m sub.train, in the folder {file.parents[1]}")


def test_a_broken_assertion_of_gpudist_core_is_said_to_be_its_fault(file):
    core = Path(gpudist_core.__file__).parent / "pipelines" / "hashing.py"
    said = "This is a fault of gpudist_core, not of the program. Please report it with this traceback."
    assert hint_for(failure(file, core, error="AssertionError")) == said
    assert hint_for(failure(core, file, error="AssertionError: mine")) == ""
    assert hint_for(failure(file, core, error="gpudist_core.errors.UsageError: Give it rows.")) == ""


def test_of_a_file_that_another_one_imported_nothing_is_said(file):
    assert hint_for(failure("/train.py", file)) == ""


@pytest.mark.parametrize(
    "error",
    ["ModuleNotFoundError: No module named 'tf_keras'", "ImportError: Keras cannot be imported. Check that it is installed."],
)
def test_who_lacks_keras_2_is_told_what_to_install(error):
    assert hint_for(failure("/train.py", error=error)).endswith('pip install "gpudist[keras2]"')


@pytest.mark.parametrize("text", [None, "", failure("/train.py", error="ValueError: no")])
def test_any_other_failure_speaks_for_itself(text):
    assert hint_for(text) == ""
