"""Find where a function changes something in Python that outlives its call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_CHANGES = ("append", "extend", "insert", "pop", "update", "add", "setdefault", "remove", "clear")
"""Methods that change a list, a dictionary or a set in its place."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_that_change_state(file: str, line: int) -> list[int]:
    """Return the lines of the function around a line that change what is not its own: a global, an attribute, an element.

    Args:
        file: A Python file.
        line: The number of a line in the function.

    Returns:
        Their numbers; none where the file cannot be read as Python.
    """
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, Function) and node.lineno <= line <= (node.end_lineno or 0)]
    if not around:
        return []
    function = max(around, key=lambda node: node.lineno)
    outside = _declared(function)
    own = _own_names(function) - outside
    changed = (target for node in ast.walk(function) for target in _changed(node, outside))
    return sorted({target.lineno for target in changed if _root(target) not in own})


def _declared(function: Function) -> set[str]:
    named = (node for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
    return {name for node in named for name in node.names}


def _own_names(function: Function) -> set[str]:
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    return arguments | {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _changed(node: ast.AST, outside: set[str]) -> Iterator[ast.expr]:
    """Yield what a statement or a call changes: whole names only where they are declared to be of elsewhere."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield node.func.value
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        if not isinstance(target, ast.Name) or target.id in outside:
            yield target


def _root(node: ast.expr) -> str | None:
    """Return the name that an attribute, an element or a call belongs to; that of `self` is nobody's own."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) and node.id != "self" else None
