"""Docstrings begin with what the function does: ruff's D401 looks at functions, this at properties, classes and modules too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFUSED = {"A", "An", "How", "Of", "The", "This", "What", "Whether"}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, _Documented]]:
    """The module, and all in it whose names, and the names around them, are public."""
    if isinstance(node, _Documented):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, _Documented) and not isinstance(child, ast.Module) else name
        if not inner.rpartition(".")[2].startswith("_") or inner == name:
            yield from documented(child, inner)


def first_words(text: str, name: str) -> dict[str, str]:
    docstrings = {place: ast.get_docstring(node) for place, node in documented(ast.parse(text), name)}
    return {place: docstring.split()[0].strip(",.:`") for place, docstring in docstrings.items() if docstring}


@pytest.mark.parametrize("package", ["emulate", "gpudist_core"])
def test_no_public_docstring_begins_with_a_noun_or_a_question(package: str) -> None:
    found: dict[str, str] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        found |= first_words(path.read_text(), str(path.relative_to(ROOT)))
    assert len(found) > 500
    assert {place: word for place, word in found.items() if word in REFUSED} == {}


def test_properties_methods_classes_and_modules_are_looked_at() -> None:
    text = """
class A:
    '''What it is.'''
    @property
    def b(self):
        '''Whether.'''
    def _c(self):
        '''How.'''
"""
    assert first_words(text, "m") == {"m.A": "What", "m.A.b": "Whether"}


def test_help_on_verify_shows_its_arguments_first() -> None:
    import emulate

    text = str(emulate.verify.__doc__)
    assert text.startswith("Verify that a program trains the same model")
    assert text.index("reference_args: 'Sequence[str] | None' = None") < text.index("Args:\n    program: `train.py`")
