"""Folders that are listed in another order: the same entries, by whatever they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.verify.host import in_another_order

_ASK = """
import glob, json, os, sys
from pathlib import Path
from emulate.verify.host import list_in_another_order

folder = Path(sys.argv[1])

def asked():
    with os.scandir(folder) as entries:
        scanned = [entry.name for entry in entries]
    return {
        "os.listdir": os.listdir(folder),
        "os.listdir of bytes": [os.fsdecode(name) for name in os.listdir(os.fsencode(folder))],
        "os.scandir": scanned,
        "os.walk": next(os.walk(folder))[2],
        "glob.glob": [os.path.basename(name) for name in glob.glob(f"{folder}/*")],
        "glob.iglob": [os.path.basename(name) for name in glob.iglob(f"{folder}/*")],
        "Path.iterdir": [path.name for path in folder.iterdir()],
        "Path.glob": [path.name for path in folder.glob("*")],
        "Path.rglob": [path.name for path in folder.rglob("*")],
    }

def of_tensorflow():
    from tensorflow.io import gfile

    return {
        "gfile.listdir": gfile.listdir(str(folder)),
        "gfile.glob": [os.path.basename(name) for name in gfile.glob(f"{folder}/*")],
        "gfile.walk": [name for _, _, files in gfile.walk(str(folder)) for name in files],
    }

before = asked()
if sys.argv[2] == "tensorflow":
    before.update(of_tensorflow())
list_in_another_order()
after = asked()
if sys.argv[2] == "tensorflow":
    after.update(of_tensorflow())
print(json.dumps([before, after]))
"""


@pytest.mark.parametrize("of", ["python", "tensorflow"])
def test_each_way_to_list_a_folder_gives_the_same_entries_in_another_order(tmp_path: Path, of: str) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(5):
        (folder / f"part-{number}.csv").touch()
    command = [sys.executable, "-c", _ASK, str(folder), of]
    asked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    before, after = json.loads(asked.stdout.splitlines()[-1])
    assert len(before) == (9 if of == "python" else 12)
    for way, names in before.items():
        assert sorted(after[way]) == sorted(names) == [f"part-{number}.csv" for number in range(5)], way
        assert after[way] != names, way


@given(st.integers(2, 60), st.integers(2, 6))
def test_files_that_are_dealt_out_go_to_other_hosts(number: int, hosts: int) -> None:
    files = [f"part-{k}.csv" for k in range(number)]
    listed = in_another_order(files)
    assert sorted(listed) == sorted(files)
    for host in range(1, min(hosts, number)):
        assert set(listed[host::hosts]) != set(files[host::hosts])


@given(st.lists(st.sampled_from(["README", "a.csv", "b.csv", "c.csv", "a.json", ".hidden"]), unique=True))
def test_files_of_one_ending_are_in_another_order_among_themselves(entries: list[str]) -> None:
    listed = in_another_order(entries)
    assert sorted(listed) == sorted(entries)
    before, after = ([name for name in names if name.endswith(".csv")] for names in (entries, listed))
    assert before != after or len(before) < 2
