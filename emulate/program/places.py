"""Find places in a program's source whose results may come in another order on each host.

String hashes differ between processes, and the listing order of a folder between disks.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from emulate.errors import UsageError
from emulate.program import notebook
from emulate.program.source import parse
from emulate.program.tracebacks import is_core, is_ours

_ORDERLESS = ("sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset", "isinstance")
"""Functions whose result does not depend on the order of their input."""
_MOST = 200
"""Files that are read at most."""


def places(file: Path, roots: tuple[Path, ...], is_one: Callable[[ast.expr], bool]) -> list[str]:
    """Find expressions in a file and in what it imports from the same folders.

    What is sorted or counted on the spot, and what only serves to look whether something is in it, are left out.

    Args:
        file: The program's.
        roots: Folders that its imports are looked for in.
        is_one: Whether an expression is one.

    Returns:
        `train.py, line 9`, say, each.
    """
    texts, seen, to_read = [], set[Path](), [file]
    while to_read and len(seen) < _MOST:
        path = to_read.pop(0).resolve()
        if path in seen or is_ours(str(path)) or is_core(str(path)):  # a checkout of gpudist may be the working directory
            continue
        seen.add(path)
        try:
            trees = notebook.trees(path, path.name) if notebook.is_notebook(path) else [(path.name, parse(path, path.name))]
        except UsageError:  # the program will say so, if it gets there
            continue
        for name, tree in trees:
            texts += [f"{name}, line {line}" for line in _lines(tree, is_one)]
            to_read += _imported(tree, (path.parent, *roots))
    return texts


def _lines(tree: ast.Module, is_one: Callable[[ast.expr], bool]) -> list[int]:
    passed = {id(argument) for node in ast.walk(tree) for argument in _without_order(node)}
    return sorted(
        {node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in passed and is_one(node)}
    )


def _without_order(node: ast.AST) -> list[ast.expr]:
    """Return the parts of a node that may come in any order."""
    if isinstance(node, ast.Compare):
        return [right for op, right in zip(node.ops, node.comparators, strict=True) if isinstance(op, (ast.In, ast.NotIn))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERLESS:
        one_by_one = [part for part in node.args if isinstance(part, (ast.GeneratorExp, ast.ListComp, ast.SetComp))]
        return [*node.args, *(generator.iter for part in one_by_one for generator in part.generators)]
    return []


def _imported(tree: ast.Module, roots: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files of modules in these folders that a module imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
        for name in filter(None, names):
            for root in dict.fromkeys(roots):
                place = root.joinpath(*name.split("."))
                yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


_HASHING = ("set", "frozenset", "hash")
_VIEWS = ("keys", "items")
_OPERATIONS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def hashes(node: ast.expr) -> bool:
    """Return whether an expression makes a set or asks for a hash."""
    if isinstance(node, ast.Set):
        return not all(isinstance(element, ast.Constant) and isinstance(element.value, (int, float)) for element in node.elts)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _HASHING
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATIONS) and any(_is_view(side) for side in (node.left, node.right))
    return isinstance(node, ast.SetComp)


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


_LISTING = ("listdir", "scandir", "glob", "iglob", "rglob", "iterdir")
_WALKED = ("os", "gfile")


def lists_a_folder(node: ast.expr) -> bool:
    """Return whether an expression lists a folder: by os, glob, pathlib or TensorFlow."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in _LISTING
    if not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in _LISTING or (node.func.attr == "walk" and _last_name(node.func.value) in _WALKED)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
