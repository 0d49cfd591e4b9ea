"""The code cells of a notebook run in order, as Jupyter would run them but for what only IPython understands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulate.errors import UsageError
from emulate.program import Program
from tests.emulate.program.test_program_start import start


def notebook(folder: Path, *cells: str, name: str = "train.ipynb") -> Path:
    """Write a notebook with these code cells, and one of text before each."""
    written = [
        cell
        for source in cells
        for cell in (
            {"cell_type": "markdown", "metadata": {}, "source": ["# %not code\n"]},
            {"cell_type": "code", "metadata": {}, "outputs": [], "source": source.splitlines(keepends=True)},
        )
    ]
    file = folder / name
    file.write_text(json.dumps({"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return file


def test_the_cells_run_in_order_in_one_module(tmp_path: Path) -> None:
    notebook(tmp_path, "import sys\nn = 1\n", "", "def f():\n    return n + 1\n", "print(f(), __name__, sys.argv)\ndisplay(3)")
    assert start(tmp_path, "train.ipynb", "-x") == "2 __main__ ['train.ipynb', '-x']\n3\nreturned None\n"


def test_an_error_names_the_cell_and_shows_its_line(tmp_path: Path) -> None:
    notebook(tmp_path, "def f(x):\n    return 1 / x", "y = 1\nf(0)")
    said = start(tmp_path, "train.ipynb")
    assert f'File "{tmp_path}/train.ipynb, cell 2", line 2, in <module>\n    f(0)' in said
    assert f'File "{tmp_path}/train.ipynb, cell 1", line 2, in f\n    return 1 / x' in said


def test_magics_are_skipped_and_named(tmp_path: Path) -> None:
    notebook(
        tmp_path,
        "%matplotlib inline\n!pip install -q 'keras \\\n    extra\nx = (7\n     % 4)",
        "if x:\n    !ls [\n?print\ntext = '''\n%no magic\n'''",
        "%%bash\necho it's\n",
        "\n%%time\ny = x + 1",
        "print(x, y, text.strip())",
    )
    assert start(tmp_path, "train.ipynb").startswith("3 4 %no magic\n")
    [note] = Program.find(str(tmp_path / "train.ipynb")).notes
    assert note == (
        "Skipped in train.ipynb, because only IPython can run it: cell 1, line 1: %matplotlib inline; "
        "cell 1, line 2: !pip install -q 'keras \\; cell 2, line 2: !ls [; cell 2, line 3: ?print; "
        "cell 3, line 1: %%bash; cell 4, line 2: %%time."
    )


def test_a_notebook_without_magics_has_no_note_and_names_cells_in_what_its_source_tells(tmp_path: Path) -> None:
    file = notebook(tmp_path, "import os", "\nfiles = os.listdir('.')")
    found = Program.find(file)
    assert found.notes == ()
    assert found.listing_places() == ["train.ipynb, cell 2, line 2"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            "x = 1\ny = = 2",
            "A notebook's cells must be valid Python. Received: program='train.ipynb' with invalid syntax (cell 1,",
        ),
        (
            "files = !ls",
            "A magic whose value is used cannot be skipped. Received: program='train.ipynb' (cell 1, line 1: files",
        ),
    ],
)
def test_a_cell_that_cannot_run_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook(tmp_path, cell)
    with pytest.raises(UsageError) as error:
        Program.find("train.ipynb")
    assert str(error.value).startswith(said)


def test_another_language_and_a_function_of_a_notebook_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    about = {"cells": [], "metadata": {"kernelspec": {"language": "R"}}}
    (tmp_path / "r.ipynb").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="whose language is 'R'"):
        Program.find("r.ipynb")
    with pytest.raises(UsageError, match="A notebook is run as a whole"):
        Program.find("train.ipynb:main")


def test_a_notebook_of_an_older_format_is_read(tmp_path: Path) -> None:
    sheet = {"cells": [{"cell_type": "code", "input": ["print(5)"], "language": "python"}]}
    (tmp_path / "old.ipynb").write_text(json.dumps({"worksheets": [sheet], "metadata": {}, "nbformat": 3}))
    assert start(tmp_path, "old.ipynb") == "5\nreturned None\n"


def test_autograph_finds_the_source_of_a_cell(tmp_path: Path) -> None:
    notebook(
        tmp_path,
        "import tensorflow as tf",
        "@tf.function\ndef f(x):\n    if x > 0:  # a condition in Python\n        return x\n    return -x",
        "print(f(tf.constant(-2.0)).numpy())",
    )
    assert start(tmp_path, "train.ipynb").startswith("2.0\nreturned None\n")
