"""Find code that depends on Python's string hashes, which differ between processes."""

from __future__ import annotations

import ast

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
