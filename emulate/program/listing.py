"""Find code that depends on the listing order of a folder, which differs between disks."""

from __future__ import annotations

import ast

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
