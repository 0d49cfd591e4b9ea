"""The user's lines: told from those of libraries, and read from scripts and notebooks."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path

import pytest

from emulate.program import described, innermost, lines_of_traceback, users


def test_libraries_python_and_gpudist_are_not_the_user_s(tmp_path: Path) -> None:
    import emulate

    own = str(tmp_path / "train.py")
    others = [
        f"{sysconfig.get_path('stdlib')}/threading.py",
        "/x/site-packages/keras/fit.py",
        str(emulate.__file__),
        "<string>",
    ]
    generated = "/tmp/__autograph_generated_file12.py"
    assert users([(file, 1) for file in (*others, generated, own)]) == [(own, 1)]


def test_a_line_under_the_program_s_folder_comes_before_an_inner_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = (str(tmp_path / "train.py"), 3), ("/elsewhere/helper.py", 8)
    assert innermost([inside, outside]) == inside
    assert innermost([outside]) == outside
    assert innermost([]) is None


def test_a_line_of_a_notebook_has_its_cell() -> None:
    name = "/work/train.ipynb, cell 3"
    linecache.cache[name] = (9, None, ["x = 1\n", "  y = 2\n"], name)
    assert described(name, 2) == {"file": "/work/train.ipynb", "line": 2, "text": "y = 2", "cell": 3}


def test_the_lines_of_a_traceback_are_the_user_s_outermost_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a()\nb()\n")
    places = [(script, 1), ("/x/site-packages/keras.py", 5), (script, 2)]
    text = "\n".join(f'  File "{file}", line {line}, in step' for file, line in places)
    assert [(one["line"], one["text"]) for one in lines_of_traceback(text)] == [(1, "a()"), (2, "b()")]
