"""Add a hint to errors that do not say how to start the program, or what to install."""

from __future__ import annotations

import re
from pathlib import Path

from emulate.program.folder import package_of
from emulate.program.tracebacks import is_core

_FILE = re.compile(r'^\s*File "([^"]+)", line \d+', re.MULTILINE)
_RELATIVE = "attempted relative import with no known parent package"
_NO_KERAS_2 = ("No module named 'tf_keras'", "ImportError: Keras cannot be imported")


def hint_for(failure: str | None) -> str:
    """Return what to do about a failure of the program.

    Args:
        failure: Its traceback; None where there is none.

    Returns:
        A sentence; empty where the error itself says enough.
    """
    error = (failure or "").rstrip().rpartition("\n")[2]
    if failure and _RELATIVE in error:
        return _as_module(_FILE.findall(failure))
    files = _FILE.findall(failure or "")
    if files and error.startswith("AssertionError") and is_core(files[-1]):  # it asserts nothing of what a program gives it
        return "This is a fault of gpudist_core, not of the program. Please report it with this traceback."
    if any(text in error for text in _NO_KERAS_2):
        return 'TF_USE_LEGACY_KERAS=1 and tf_keras need Keras 2: pip install "gpudist[keras2]"'
    return ""


def _as_module(files: list[str]) -> str:
    """Return how to start the program's own file as a module; empty for a file that another one imported."""
    if len(files) != 1:
        return ""
    file, here = Path(files[0]), Path.cwd()
    root, module = package_of(file)
    if module is None:  # a package need not have an __init__.py
        root = here if here in file.parent.parents else file.parent.parent
        module = ".".join(file.relative_to(root).with_suffix("").parts)
    where = "" if root == here else f", in the folder {root}"
    return f"A file that imports from its own package is started as a module of it: -m {module}{where}"
