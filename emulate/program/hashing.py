"""Where a program may depend on how Python hashes strings, which is another way in each process, as its source tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from emulate.errors import WrongUse
from emulate.program.source import parse

_HASHING = ("set", "frozenset", "hash")
_ORDERLESS = ("sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset", "isinstance")
"""What takes a set and gives the same for each order of it."""
_VIEWS = ("keys", "items")
_OPERATIONS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
_MOST = 200
"""Files that are read at most."""


def hash_places(file: Path, roots: tuple[Path, ...]) -> list[str]:
    """Find where a file, and what it imports from the same folders, makes sets or asks for hashes.

    What only looks whether something is in a set, and a set that is sorted or counted on the spot, are left out.

    Args:
        file: The program's.
        roots: Folders that its imports are looked for in.

    Returns:
        `train.py, line 9`, say, each.
    """
    found, seen, to_read = [], set[Path](), [file]
    while to_read and len(seen) < _MOST:
        one = to_read.pop(0).resolve()
        if one in seen:
            continue
        seen.add(one)
        try:
            tree = parse(one, one.name)
        except WrongUse:  # the program will say so, if it gets there
            continue
        found += [f"{one.name}, line {line}" for line in _lines(tree)]
        to_read += _imported(tree, (one.parent, *roots))
    return found


def _lines(tree: ast.Module) -> list[int]:
    passed = {id(argument) for node in ast.walk(tree) for argument in _without_order(node)}
    lines = {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in passed and _makes_a_set(node)
    }
    return sorted(lines)


def _without_order(node: ast.AST) -> list[ast.expr]:
    """The parts of a node that may come in any order."""
    if isinstance(node, ast.Compare):
        return [right for op, right in zip(node.ops, node.comparators, strict=True) if isinstance(op, (ast.In, ast.NotIn))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERLESS:
        return list(node.args)
    return []


def _makes_a_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set):
        return not all(isinstance(one, ast.Constant) and isinstance(one.value, (int, float)) for one in node.elts)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _HASHING
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATIONS) and any(_is_view(side) for side in (node.left, node.right))
    return isinstance(node, ast.SetComp)


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


def _imported(tree: ast.Module, roots: tuple[Path, ...]) -> Iterator[Path]:
    """The files of modules in these folders that a module imports."""
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
