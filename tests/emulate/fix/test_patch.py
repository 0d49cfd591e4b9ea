"""Diffs that tools can apply, and files that are replaced at once or not at all."""

import os
import shutil
import subprocess

import pytest

pytest.importorskip("libcst")

from emulate.errors import UsageError
from emulate.fix.patch import Edited, check_editable, unified_diff, write_edits


@pytest.mark.parametrize("text", [b"a\nb\nc\n", b"a\r\nb\r\nc\r\n", b"a\nb\nc"])
def test_a_diff_is_applied_by_git(tmp_path, monkeypatch, text):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_bytes(text)
    diff = unified_diff(file, text, text.replace(b"b", b"B").replace(b"c", b"C"))
    subprocess.run(["git", "apply"], input=diff.encode(), check=True)
    assert file.read_bytes() == text.replace(b"b", b"B").replace(b"c", b"C")


def test_a_written_file_leaves_a_copy_of_what_it_was(tmp_path):
    file = tmp_path / "train.py"
    file.write_bytes(b"old\r\n")
    file.chmod(0o750)
    [backup] = write_edits({file: Edited(b"old\r\n", b"new\r\n")})
    assert (file.read_bytes(), backup.read_bytes(), backup.name) == (b"new\r\n", b"old\r\n", "train.py.orig")
    assert file.stat().st_mode & 0o777 == 0o750
    [second] = write_edits({file: Edited(b"new\r\n", b"newer")})
    assert second.name == "train.py.orig1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "train.py.orig", "train.py.orig1"]


def test_a_link_stays_one(tmp_path):
    file, link = tmp_path / "real.py", tmp_path / "train.py"
    file.write_bytes(b"old")
    link.symlink_to(file)
    write_edits({link: Edited(b"old", b"new")})
    assert link.is_symlink()
    assert file.read_bytes() == b"new"


def test_a_file_that_changed_meanwhile_is_left(tmp_path):
    file = tmp_path / "train.py"
    file.write_bytes(b"another")
    with pytest.raises(UsageError, match="A file must not change while gpudist verifies it"):
        write_edits({file: Edited(b"old", b"new")})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"another"]


def test_a_file_that_is_read_only_is_found_out_before_the_work(tmp_path, monkeypatch):
    file = tmp_path / "train.py"
    file.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(UsageError, match="--write needs a program that can be written"):
        check_editable(file)
