"""Where a program's own source makes sets or asks for hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.program import Program, users


@pytest.mark.parametrize(
    "source",
    [
        "words = list(set(texts))",
        "words = {word for text in texts for word in text}",
        "names = {first, second}",
        "names = {'a', 'b'}",
        "part = hash(name) % hosts",
        "known = frozenset(names)",
        "common = one.keys() & other.keys()",
        "def later():\n    return 1 if 'x' in names else set(names)",
    ],
)
def test_what_depends_on_the_order_of_strings_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert Program.find(str(tmp_path / "train.py")).hash_places() == [f"train.py, line {len(source.splitlines())}"]


@pytest.mark.parametrize(
    "source",
    [
        "words = sorted(set(texts))",
        "number = len({word for word in text})",
        "words = sorted(word for word in set(text))",
        "if mode in {'train', 'eval'}: pass",
        "if mode not in set(modes): pass",
        "layers = {1, 2, 3}",
        "kinds: set[str]",
        "rows = {'a': 1}",
        "model.set(3)",
        "left = one - two",
    ],
)
def test_what_comes_in_no_order_is_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert Program.find(str(tmp_path / "train.py")).hash_places() == []


def test_modules_of_its_own_are_looked_at_each_once_and_those_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "train.py").write_text("import os, package.data, broken\nfrom package import words\n")
    (tmp_path / "broken.py").write_text("def (")
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("from . import words\nfrom .words import number\n\nfiles = set(number)\n")
    (package / "words.py").write_text("from package import data\nwords = {'a', data}\n")
    found = Program.find(str(tmp_path / "train.py")).hash_places()
    assert sorted(found) == ["data.py, line 4", "words.py, line 2"]


def test_a_callable_is_looked_at_in_the_file_it_is_written_in(tmp_path: Path) -> None:
    def train() -> list[str]:
        return list({"a", "b"})

    found = Program.find(train).hash_places()
    assert f"test_hashing.py, line {train.__code__.co_firstlineno + 1}" in found
    assert Program.find(print).hash_places() == []


def test_gpudist_s_own_packages_are_not_the_program_s_wherever_they_lie(tmp_path: Path) -> None:
    source = "from gpudist_core import steps\nimport emulate\nwords = {'a', steps}\n"
    (tmp_path / "train.py").write_text(source)
    for package in (tmp_path / "gpudist_core", tmp_path / "gpudist_core" / "steps"):
        package.mkdir()
        (package / "__init__.py").write_text("import os\nnames = set(os.environ)\nfiles = os.listdir()\n")
    found = Program.find(str(tmp_path / "train.py"))
    assert found.hash_places() == ["train.py, line 3"]
    assert found.listing_places() == []
    assert users([(str(tmp_path / "gpudist_core" / "steps" / "__init__.py"), 2)]) == []
