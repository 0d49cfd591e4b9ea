"""Start a program in a host as Python itself would start it."""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import pickle
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from emulate.errors import UsageError
from emulate.program.notebook import cells_of

if TYPE_CHECKING:
    from emulate.program.program import Program

PathMap = Callable[[Path], Path]


def start(program: Program, path: PathMap) -> Any:
    """See `Program.start`."""
    atexit._clear()  # what the pre-loaded parent registered is its own affair, or would run once for every host
    _set_arguments(program, path)
    try:
        return _STARTERS[program.kind](program, path)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        return None
    finally:
        _end_as_python_does()


def _end_as_python_does() -> None:
    """Do what Python does between the last line of a program and the end of the process, in this order."""
    getattr(threading, "_shutdown", lambda: None)()  # waits for the program's threads and executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _set_arguments(program: Program, path: PathMap) -> None:
    file = None if program.file is None else path(program.file)
    typed = program.name if program.kind in ("script", "notebook") and not os.path.isabs(program.name) else None
    sys.argv[:] = [typed or str(file or "-c"), *program.args]
    if program.import_root is not None:
        root = Path.cwd() if program.kind == "module" else path(program.import_root)
        sys.path[:] = [str(root), *(entry for entry in program.search_path if entry != str(root))]
    else:
        sys.path[:] = list(program.search_path)
    importlib.invalidate_caches()


def _run_script(program: Program, path: PathMap) -> None:
    assert program.file is not None
    file = path(program.file)
    loader = importlib.machinery.SourceFileLoader("__main__", str(file))
    code = loader.source_to_code(file.read_bytes(), str(program.file))
    _run_as_main(code, str(file), loader, None)


def _run_notebook(program: Program, path: PathMap) -> None:
    """Run the code cells in order, in one `__main__`; tracebacks and autograph find the source of a cell in linecache."""
    assert program.file is not None
    module = _main_module(None, None, None)
    module.__dict__["display"] = print  # which IPython provides
    for cell in cells_of(path(program.file), program.name):
        name = cell.file_name(program.file)
        # Without a time of change linecache does not look for a file of this name, and keeps the entry.
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(keepends=True), name)
        exec(compile(cell.source, name, "exec"), module.__dict__)


def _run_module(program: Program, path: PathMap) -> None:
    assert program.module is not None
    spec = importlib.util.find_spec(program.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{program.module}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader) or spec.origin is None:
        raise UsageError(f"A program's module must be Python source. Received: program={program.name!r}.")
    code = spec.loader.get_code(spec.name)
    assert code is not None
    sys.argv[0] = spec.origin
    _run_as_main(code, spec.origin, spec.loader, spec)


def _run_as_main(code: CodeType, file: str, loader: object, spec: ModuleSpec | None) -> None:
    exec(code, _main_module(file, loader, spec).__dict__)


def _main_module(file: str | None, loader: object, spec: ModuleSpec | None) -> ModuleType:
    """Keep `__main__` in place afterwards, unlike runpy: threads, exit handlers and pickles still refer to it."""
    module = ModuleType("__main__")
    module.__dict__.update(
        **({} if file is None else {"__file__": file}),  # a notebook has none
        __loader__=loader,
        __spec__=spec,
        __package__=None if spec is None else spec.parent,
        __builtins__=__builtins__,
        __cached__=None if spec is None else spec.cached,
        __annotations__={},
    )
    sys.modules["__main__"] = module
    return module


def _call_function(program: Program, path: PathMap) -> Any:
    assert program.function is not None
    module = importlib.import_module(program.module) if program.module else _import_file(program, path)
    function = getattr(module, program.function, None)
    if not callable(function):
        raise UsageError(
            f"A program's function must be there once its file has run. Received: program={program.name!r}, "
            f"whose {program.function!r} is {'not there' if function is None else f'a {type(function).__name__}'}."
        )
    return function()


def _import_file(program: Program, path: PathMap) -> ModuleType:
    assert program.file is not None
    name = program.file.stem if program.file.stem not in sys.modules else f"{program.file.stem}_program"
    spec = importlib.util.spec_from_file_location(name, path(program.file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call_callable(program: Program, path: PathMap) -> Any:
    assert program.pickled is not None
    return pickle.loads(program.pickled)()


_STARTERS: dict[str, Callable[[Program, PathMap], Any]] = {
    "script": _run_script,
    "notebook": _run_notebook,
    "module": _run_module,
    "function": _call_function,
    "callable": _call_callable,
}
