"""Edits of notebooks: a cell changes, and all else of the file stays to the byte."""

import json

import pytest

pytest.importorskip("libcst")

from emulate.fix.patch import as_notebook, as_python, line_in_python


def notebook(*cells, indent=1, end="\n", ascii_only=False):
    written = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Über\n", "Text"]},
        *({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": cell} for cell in cells),
    ]
    content = {"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(content, indent=indent, ensure_ascii=ascii_only) + end).encode()


CELLS = (
    ["%matplotlib inline\n", "import tensorflow as tf\n", "!pip install \\\n", "  keras"],
    [],
    "%%time\nx = 1\n\nloss = tf.reduce_mean(x)\n",
    ["%%bash\n", "echo loss = tf.reduce_mean(x)"],
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "train.ipynb"


@pytest.mark.parametrize(("indent", "end", "ascii_only"), [(1, "\n", False), (2, "", True), (None, "", False)])
def test_a_notebook_without_an_edit_stays_as_it_is(file, indent, end, ascii_only):
    content = notebook(*CELLS, indent=indent, end=end, ascii_only=ascii_only)
    assert as_notebook(content, as_python(file, content)) == content


def test_an_edit_changes_its_cell_alone(file):
    content = notebook(*CELLS)
    python = as_python(file, content)
    lines = python.decode().split("\n")
    number = line_in_python(python, 2, 4)
    assert lines[number - 1] == "loss = tf.reduce_mean(x)"
    lines[number - 1 : number] = ["count = 4", "loss = tf.reduce_mean(x) / count"]
    edited = as_notebook(content, "\n".join(lines).encode())
    assert edited == content.replace(b"loss = tf.reduce_mean(x)\\n", b"count = 4\\nloss = tf.reduce_mean(x) / count\\n")


def test_the_cells_are_python_that_can_be_parsed(file):
    compile(as_python(file, notebook(*CELLS)), "cells", "exec")
