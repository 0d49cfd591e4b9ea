"""A supervisor's scratch folder: abandoned ones go, those that somebody may hold stay."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from emulate.cluster.parent import make_scratch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="hosts are emulated on Linux only")


def test_a_folder_that_is_held_stays_and_an_abandoned_one_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "gpudist-of-somebody-else").mkdir()
    (tmp_path / "gpudist-fault.txt").touch()
    first, held = make_scratch()
    (first / "deep").mkdir()
    second, also_held = make_scratch()
    assert first.exists()
    assert held is not None
    os.close(held)
    third, _ = make_scratch()
    assert not first.exists()
    assert second.exists()
    assert third.exists()
    assert also_held is not None
    assert {"gpudist-of-somebody-else", "gpudist-fault.txt"} < {path.name for path in tmp_path.iterdir()}


def test_where_the_file_system_has_no_locks_folders_are_made_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = make_scratch()
    assert held is not None
    os.close(held)
    monkeypatch.setattr(fcntl, "flock", refuse)
    folder, held = make_scratch()
    assert held is None
    assert folder.exists()
    assert left.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other, held = make_scratch()
    assert held is not None
    os.close(held)
    assert sorted(tmp_path.iterdir()) == sorted([folder, other])  # of `folder` nobody can tell
