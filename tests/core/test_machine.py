from __future__ import annotations

from pathlib import Path

import pytest

from gpudist_core import machine


@pytest.mark.parametrize(
    ("statistics", "free"),
    [("", 100), ("anon 500\ninactive_file 300\n", 400), ("inactive_file 7\ntotal_inactive_file 200\n", 300)],
    ids=["unknown", "version 2", "version 1"],
)
def test_in_a_container_files_that_were_read_leave_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statistics: str, free: int
) -> None:
    for name, text in (("limit", "1000"), ("use", "900"), ("statistics", statistics)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, {"limit": "_LIMITS", "use": "_USES"}.get(name, "_STATISTICS"), (str(tmp_path / name),))
    assert machine.free_memory() == free


def test_without_a_limit_of_the_container_the_machines_memory_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("max")
    monkeypatch.setattr(machine, "_LIMITS", (str(tmp_path / "limit"),))
    assert machine.free_memory() > 1000
