"""Read a program's source without running it, and find places in it whose results may come in another order on each host.

String hashes differ between processes, and the listing order of a folder between disks.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from emulate.errors import UsageError, did_you_mean
from emulate.program import notebook
from emulate.program.tracebacks import is_core, is_ours

_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
_FORMS = "A program is written train.py, train.ipynb, -m package.module, train.py:function or package.module:function."


def find_file(text: str, name: str) -> Path:
    """Find a program's file.

    Args:
        text: The path as it was written.
        name: The whole program as it was written, for messages.

    Returns:
        The file's absolute path.

    Raises:
        UsageError: When there is no such file, or it is not one.
    """
    path = Path(os.path.abspath(Path(text).expanduser()))
    if path.is_dir():
        raise UsageError(f"A program must be a file, not a folder. Received: program={name!r}. {_offer(path, '')}")
    if path.is_symlink() and not path.exists():
        raise UsageError(
            f"A program's file must exist. Received: program={name!r}, a link to {os.readlink(path)!r}, which does not. "
            "Fix the link, or name another file."
        )
    if not path.exists():
        raise UsageError(f"A program's file must exist. Received: program={name!r}. {_offer(path.parent, path.name, text)}")
    # /dev/stdin was redirected from a file: each host has another standard input.
    is_stream = path.is_relative_to("/dev") or path.is_relative_to("/proc")
    path = Path(os.path.realpath(path)) if is_stream else path
    if not path.is_file():
        raise UsageError(
            f"A program must be a regular file, which each host reads anew. Received: program={name!r}, a pipe or a device. "
            "Write it to a file first."
        )
    return path


def _offer(folder: Path, wanted: str, text: str = "") -> str:
    if not folder.is_dir():
        folders = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        return f"There is no folder {str(folder)!r} either. {did_you_mean(folder.name, folders)}".rstrip()
    files = sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".ipynb"))
    same_stem = [file for file in files if file in (wanted + ".py", wanted + ".ipynb")]
    if wanted and (near := difflib.get_close_matches(wanted, files, n=1, cutoff=0.6) or same_stem):
        return f"Did you mean {os.path.join(os.path.dirname(text), near[0])!r}?"
    if wanted and find_module_file(wanted) is not None:
        return f"A module is written with -m: did you mean '-m {wanted}'?"
    if not files:
        return f"{_FORMS} There is no Python file in {str(folder)!r}."
    return f"The Python files there are: {', '.join(files[:8])}{', ...' if len(files) > 8 else ''}."


def find_module_file(module: str, runnable: bool = True) -> Path | None:
    """Find the source file of a module without importing it or its packages.

    Args:
        module: The dotted name.
        runnable: For a package: its `__main__`, as `python -m` takes it, instead of its `__init__`.

    Returns:
        The file, None where there is no such module.
    """
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    importlib.invalidate_caches()
    spec = None
    for count in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:count]), None if spec is None else spec.submodule_search_locations)
        if spec is None or (count < len(parts) and spec.submodule_search_locations is None):
            return None
    if runnable and spec is not None and spec.submodule_search_locations is not None:
        return find_module_file(f"{module}.__main__")
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _find_spec(name: str, locations: Iterable[str] | None) -> importlib.machinery.ModuleSpec | None:
    path = [os.getcwd(), *sys.path] if locations is None else list(locations)
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    finders = iter([] if spec else sys.meta_path)
    while spec is None and (finder := next(finders, None)) is not None:
        spec = finder.find_spec(name, None if locations is None else path)
    return spec


def parse(file: Path, name: str) -> ast.Module:
    """Parse a program's file.

    Args:
        file: The file.
        name: The program as it was written, for messages.

    Returns:
        Its syntax tree.

    Raises:
        UsageError: When it cannot be read or is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        line = (error.text or "").strip()
        where = f"{file.name}, line {error.lineno}" + (f": {line}" if line else "")
        raise UsageError(
            f"A program must be valid Python {sys.version_info[0]}.{sys.version_info[1]}. "
            f"Received: program={name!r} with {error.msg} ({where}). Fix that line first."
        ) from None
    except ValueError as error:
        raise UsageError(f"A program must be Python source. Received: program={name!r}, which is not text ({error}).") from None
    except OSError as error:
        raise UsageError(f"A program's file must be readable. Received: program={name!r} ({error.strerror}).") from None


def check_function(tree: ast.Module, function: str, name: str) -> None:
    """Check that a module has a function that can be called without arguments, as far as its source tells.

    Args:
        tree: The module's syntax tree.
        function: The function's name.
        name: The program as it was written, for messages.

    Raises:
        UsageError: When it has not.
    """
    bindings = [node for node in _statements(tree.body) if function in _bound_by(node)]
    if not bindings:
        _check_may_be_there(tree, function, name)
        return
    node = bindings[-1]
    if isinstance(node, (ast.AsyncFunctionDef, ast.ClassDef)):
        what = "a class" if isinstance(node, ast.ClassDef) else "an async function"
        raise UsageError(f"A program must be a plain function. Received: program={name!r}, which is {what}. Name a function.")
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:  # a decorator may supply arguments (CLI libraries do)
        positional = [*node.args.posonlyargs, *node.args.args]
        needed = positional[: len(positional) - len(node.args.defaults)]
        needed += [a for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
        if needed:
            raise needs_arguments(name, [argument.arg for argument in needed])


def needs_arguments(name: str, needed: list[str]) -> UsageError:
    """Return the error for a function that cannot be called without arguments."""
    return UsageError(
        f"A program must be callable without arguments. Received: program={name!r}, which needs {', '.join(needed)}. "
        "Give them defaults, or name a function without arguments that calls it."
    )


def _check_may_be_there(tree: ast.Module, function: str, name: str) -> None:
    statements = list(_statements(tree.body))
    functions = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    if "__getattr__" in functions or any(alias.name == "*" for node in imports for alias in node.names):
        return
    near = difflib.get_close_matches(function, functions, n=1)
    path = name.rsplit(":", 1)[0]
    if near:
        hint = f"Did you mean {f'{path}:{near[0]}'!r}?"
    else:
        hint = f"Functions there: {', '.join(functions[:8])}." if functions else f"{path!r} has no functions."
    raise UsageError(f"A program's function must be there at the top level of its file. Received: program={name!r}. {hint}")


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of the top level, including those under `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            parts = [getattr(node, part, ()) for part in ("body", "orelse", "finalbody")]
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            yield from _statements(statement for part in [*parts, *handlers] for statement in part)


def _bound_by(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


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
            nodes = list(ast.walk(tree))
            passed = {id(part) for node in nodes for part in _without_order(node)}
            expressions = [node for node in nodes if isinstance(node, ast.expr) and id(node) not in passed]
            texts += [f"{name}, line {line}" for line in sorted({node.lineno for node in expressions if is_one(node)})]
            to_read += _imported(tree, (path.parent, *roots))
    return texts


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
        methods = [side.func for side in (node.left, node.right) if isinstance(side, ast.Call)]
        has_view = any(isinstance(method, ast.Attribute) and method.attr in _VIEWS for method in methods)
        return isinstance(node.op, _OPERATIONS) and has_view
    return isinstance(node, ast.SetComp)


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
    owner = node.func.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return node.func.attr in _LISTING or (node.func.attr == "walk" and name in _WALKED)
