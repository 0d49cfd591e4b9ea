"""A program starts with edited source, and its files and paths stay as they are."""

import subprocess
import sys
import textwrap

START = """
import sys
from dataclasses import replace
from pathlib import Path
from emulate.program import Program
program = Program.find(sys.argv[1])
edits = tuple((Path(file).absolute(), Path(file).read_bytes().replace(b"old", b"new")) for file in sys.argv[2:])
print("returned", replace(program, edits=edits).start())
"""


def start(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


SCRIPT = """
import inspect, linecache, os, part
def told():
    return "old"
linecache.updatecache(inspect.getfile(told), globals())  # as autograph does
print(told(), inspect.getsource(told).split()[-1], part.VALUE, os.path.relpath(__file__))
"""


def test_a_script_and_its_modules_are_edited_and_keep_their_paths(tmp_path):
    write(tmp_path, train=SCRIPT, part="VALUE = 'old'\n")
    assert start(tmp_path, "train.py", "train.py", "part.py") == 'new "new" new train.py\nreturned None\n'
    assert start(tmp_path, "train.py", "train.py") == 'new "new" old train.py\nreturned None\n'
    assert start(tmp_path, "train.py") == 'old "old" old train.py\nreturned None\n'


def test_a_function_and_a_module_are_edited(tmp_path):
    write(tmp_path, train="def main():\n    return 'old'\nprint('old')\n")
    assert start(tmp_path, "train.py:main", "train.py") == "new\nreturned new\n"
    assert start(tmp_path, "-m train", "train.py") == "new\nreturned None\n"


def test_edited_source_leaves_no_bytecode_behind(tmp_path):
    write(tmp_path, train="import part\nprint(part.VALUE)\n", part="VALUE = 'old'\n")
    assert start(tmp_path, "train.py", "part.py").startswith("new")
    assert start(tmp_path, "train.py").startswith("old")
