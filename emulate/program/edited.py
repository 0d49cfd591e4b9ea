"""Load edited source instead of what a file holds: the files stay as they are, and so do all paths of the program."""

from __future__ import annotations

import importlib.abc
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_texts: dict[str, bytes] = {}


def install_edits(edits: Iterable[tuple[Path, bytes]], path: Callable[[Path], Path]) -> None:
    """Make this process load edited source.

    Args:
        edits: Files of the program, with the source to load instead.
        path: Where a file of the user lies for this run.
    """
    for file, text in edits:
        _texts.update({os.path.realpath(file): text, os.path.realpath(path(file)): text})
    if _texts:
        sys.meta_path.insert(0, _EditedModules())
        # TensorFlow 2.21's autograph calls it for every function that it converts, and would read the file.
        linecache.updatecache = partial(_update_linecache, linecache.updatecache)


def edited(file: str) -> bytes | None:
    """Return the edited content of a file; None where it is not edited."""
    return _texts.get(os.path.realpath(file))


def source_loader(name: str, file: str) -> SourceFileLoader:
    """Return the loader of a source file: of its edited source where there is one."""
    text = edited(file)
    return SourceFileLoader(name, file) if text is None else _EditedSource(name, file, text)


def _update_linecache(
    original: Callable[[str, dict[str, Any] | None], list[str]], filename: str, module_globals: dict[str, Any] | None = None
) -> list[str]:
    text = edited(filename)
    if text is None:
        return original(filename, module_globals)
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    # Without a time of change linecache does not look for the file, and keeps the entry.
    linecache.cache[filename] = (len(text), None, lines, filename)
    return lines


class _EditedSource(SourceFileLoader):
    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError(path)  # so that importlib neither reads nor writes bytecode


class _EditedModules(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or edited(spec.origin) is None:
            return None
        spec.loader = source_loader(fullname, spec.origin)
        return spec
