"""Where a program's own source lists folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.program import Program


@pytest.mark.parametrize(
    "source",
    [
        "files = os.listdir(folder)[host::hosts]",
        "files = [entry.path for entry in os.scandir(folder)]",
        "files = glob.glob('*.csv')",
        "files = glob('*.csv')",
        "files = list(Path(folder).rglob('*.csv'))",
        "for file in folder.iterdir(): pass",
        "for top, folders, files in os.walk(folder): pass",
        "files = tf.io.gfile.glob('*.csv')",
        "for top, folders, files in tf.io.gfile.walk(folder): pass",
    ],
)
def test_what_comes_in_the_order_of_a_disk_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert Program.find(str(tmp_path / "train.py")).listing_places() == ["train.py, line 1"]


@pytest.mark.parametrize(
    "source",
    [
        "files = sorted(os.listdir(folder))",
        "files = sorted(file for file in folder.glob('*.csv') if file.is_file())",
        "number = len(glob.glob('*.csv'))",
        "newest = max(folder.iterdir(), key=age)",
        "found = 'a.csv' in os.listdir(folder)",
        "for node in ast.walk(tree): pass",
        "glob = 3",
    ],
)
def test_what_is_sorted_or_counted_is_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert Program.find(str(tmp_path / "train.py")).listing_places() == []
