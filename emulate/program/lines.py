"""Tell the user's lines from those of libraries, and read them; load edited source instead of what a file holds.

A host works on copies of the user's files where the system refuses views. Code that is imported from a copy gets the name of
the original. So all that reads the names of code names the user's files: tracebacks, stacks of hosts that hang, lines of
operations and of calls. `__file__` stays the copy's: what the program finds or writes beside it is there.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import linecache
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from emulate.program.tracebacks import is_core, is_ours

_CELL = re.compile(r"^(?P<file>.+\.ipynb), cell (?P<cell>\d+)$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_PACKAGES = ("site-packages", "dist-packages")
_GENERATED = "__autograph_generated_file"


def users(frames: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the frames of the user's own files, in their order."""
    return [frame for frame in frames if is_users(frame[0])]


def is_users(file: str) -> bool:
    """Return whether a file is the user's: neither a library's, Python's nor ours. What lies beside the program is, too."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return _is_users(file, original(main) if isinstance(main, str) else "")


@lru_cache(maxsize=4096)
def _is_users(file: str, main: str) -> bool:
    if file.startswith("<") or _GENERATED in file:
        return False
    if main and not is_ours(main) and os.path.dirname(file) == os.path.dirname(main):
        return True
    if is_ours(file) or is_core(file) or any(part in _PACKAGES for part in Path(file).parts):
        return False
    of_python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not file.startswith(tuple(f"{path}{os.sep}" for path in (*of_python, site.getusersitepackages())))


def innermost(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost frame under the program's folder, else the innermost of all."""
    roots = tuple(f"{original(os.path.abspath(path))}{os.sep}" for path in {sys.path[0] if sys.path else "", os.getcwd()})
    own = [frame for frame in frames if frame[0].startswith(roots)]
    candidates = own or frames
    return candidates[-1] if candidates else None


def described(file: str, line: int) -> dict[str, Any]:
    """Return a line as traces and reports have it: file, line, text, and in a notebook the cell."""
    match = _CELL.match(file)
    place: dict[str, Any] = {"file": match["file"] if match else file, "line": line}
    place["text"] = linecache.getline(file, line).strip()
    return place | ({"cell": int(match["cell"])} if match else {})


def lines_of_traceback(text: str) -> Iterator[dict[str, Any]]:
    """Yield the user's lines of a traceback or stack as Python prints it, outermost first."""
    for match in _FRAME.finditer(text):
        if is_users(match["file"]):
            yield described(match["file"], int(match["line"]))


_copies = ""


def name_originals(root: str) -> None:
    """Name the originals in this process from now on.

    Args:
        root: The folder of the copies, without a slash at its end. The copy of `/a/b.py` is `<root>/a/b.py`.
    """
    global _copies
    _copies = root
    get_code = SourceFileLoader.get_code

    def get_named_code(self: SourceFileLoader, fullname: str) -> Any:
        return _named(get_code(self, fullname), original(self.path))

    SourceFileLoader.get_code = get_named_code  # type: ignore[assignment, method-assign]


def original(text: str) -> str:
    """Return a path or a text with the paths of the user's files in place of those of their copies."""
    return text.replace(_copies, "") if _copies else text


def _named(code: Any, file: str) -> Any:
    consts = tuple(_named(const, file) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code if code.co_filename == file else code.replace(co_filename=file, co_consts=consts)


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
    inside = _function_around(file, line)
    outside = {name for node in inside if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    arguments = {node.arg for node in inside if isinstance(node, ast.arg)}
    names = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own = (arguments | names) - outside
    changed = (target for node in inside for target in _changed(node, outside))
    return sorted({target.lineno for target in changed if _owner_of(target) not in own})


def lines_that_return(file: str, line: int) -> list[int]:
    """Return the lines of the function around a line that return a value, the last one first.

    Args:
        file: A Python file.
        line: The number of a line in the function.

    Returns:
        Their numbers; none where the file cannot be read as Python.
    """
    inside = _function_around(file, line)
    inner = {part for node in inside[1:] if isinstance(node, Function) for part in ast.walk(node)}
    return sorted((n.lineno for n in inside if isinstance(n, ast.Return) and n.value and n not in inner), reverse=True)


def _function_around(file: str, line: int) -> list[ast.AST]:
    """Return all parts of the innermost function around a line, itself first; none where there is none."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, Function) and node.lineno <= line <= (node.end_lineno or 0)]
    return list(ast.walk(max(around, key=lambda node: node.lineno))) if around else []


def _changed(node: ast.AST, outside: set[str]) -> Iterator[ast.expr]:
    """Yield what a statement or a call changes: whole names only where they are declared to be of elsewhere."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield node.func.value
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        if not isinstance(target, ast.Name) or target.id in outside:
            yield target


def _owner_of(node: ast.expr) -> str | None:
    """Return the name that an attribute, an element or a call belongs to; that of `self` is nobody's own."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) and node.id != "self" else None


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
    return SourceFileLoader(name, file) if edited(file) is None else _EditedSource(name, file)


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
    def get_data(self, path: str) -> bytes:
        text = edited(path)
        return super().get_data(path) if text is None else text  # also asked for what lies beside a package

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError(path)  # so that importlib neither reads nor writes bytecode


class _EditedModules(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or edited(spec.origin) is None:
            return None
        spec.loader = source_loader(fullname, spec.origin)
        return spec
