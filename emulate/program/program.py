"""Find and check a program without importing it, then start it in a host as Python itself would.

Callables become bytes by value, so that a host needs neither the caller's module nor its state.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from emulate.errors import UsageError
from emulate.pickling import to_bytes
from emulate.program import notebook, source
from emulate.program.lines import edited, install_edits, source_loader
from emulate.program.notebook import cells_of
from emulate.program.tracebacks import package_of, working_directory

PathMap = Callable[[Path], Path]


@dataclass(frozen=True)
class Program:
    """Describe the program to verify. `Program.find` makes it; it is plain data that can be sent to a host.

    Attributes:
        name: As the user wrote it, for messages.
        kind: `script`, `notebook`, `module` (run as `python -m` does), `function` or `callable`.
        args: What the program finds in `sys.argv[1:]`.
        file: Its source file; None for a callable.
        module: Dotted name of the module, where it is run or imported by name.
        function: The function's name, for `function`.
        import_root: The folder that Python would put first on `sys.path`.
        written: The file that a callable is written in, where there is one.
        cwd: The working directory it was found from.
        search_path: The rest of `sys.path`.
        notes: What of it is not run.
        edits: Files of the program with the source that is loaded instead of theirs.

    Example:
        program = Program.find("train.py", ["--epochs", "2"])
        program.start()  # in a host
    """

    name: str
    kind: str
    args: tuple[str, ...] = ()
    file: Path | None = None
    module: str | None = None
    function: str | None = None
    import_root: Path | None = None
    pickled: bytes | None = field(default=None, repr=False)
    written: Path | None = None
    cwd: Path = field(default_factory=Path.cwd)
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(map(os.path.abspath, sys.path)), repr=False)
    notes: tuple[str, ...] = ()
    edits: tuple[tuple[Path, bytes], ...] = field(default=(), repr=False)

    @classmethod
    def find(cls, target: str | os.PathLike[str] | Callable[[], Any] | Program, args: Sequence[str] = ()) -> Program:
        """Find a program and check what can be checked without running it. Nothing of the user's is imported.

        Args:
            target: `train.py`, `train.ipynb`, `-m package.module`, `train.py:function`, `package.module:function`, or a
                callable.
            args: The program's own arguments.

        Returns:
            The program, ready to be started or sent to a host.

        Raises:
            UsageError: When there is no such program, it cannot be one, or the working directory is gone.
        """
        if isinstance(target, Program):
            return target
        working_directory()
        if not isinstance(target, (str, os.PathLike)):
            return cls._of_callable(target, tuple(args))
        name = os.fspath(target).strip()
        if name.startswith("-m ") or name == "-m":
            module = name[2:].strip()
            file = _module_file(name, module, runnable=True)
            source.parse(file, name)
            return cls(name, "module", tuple(args), file=file, module=module, import_root=Path.cwd())
        where, _, function = name.rpartition(":")
        if where and not os.path.exists(name):
            return cls._of_function(name, where, function, tuple(args))
        file = source.find_file(name, name)
        if notebook.is_notebook(file):
            notes = tuple(filter(None, [notebook.skipped(file, notebook.cells_of(file, name))]))
            return cls(name, "notebook", tuple(args), file=file, import_root=file.resolve().parent, notes=notes)
        source.parse(file, name)
        return cls(name, "script", tuple(args), file=file, import_root=file.resolve().parent)

    @classmethod
    def _of_function(cls, name: str, where: str, function: str, args: tuple[str, ...]) -> Program:
        if not function.isidentifier():
            raise UsageError(
                f"What follows the colon must be a function's name. Received: program={name!r}. "
                f"Write {f'{where}:main'!r}, say, or {where!r} alone to run all of it."
            )
        if where.endswith(notebook.SUFFIX):
            raise UsageError(f"A notebook is run as a whole. Received: program={name!r}. Name {where!r} alone.")
        if where.endswith(".py") or os.sep in where:
            file = source.find_file(where, name)
            root, module = package_of(file)
        else:
            file, root, module = _module_file(name, where, runnable=False), Path.cwd(), where
        source.check_function(source.parse(file, name), function, name)
        return cls(name, "function", args, file=file, module=module, function=function, import_root=root)

    @classmethod
    def _of_callable(cls, target: Any, args: tuple[str, ...]) -> Program:
        if not callable(target):
            raise UsageError(
                f"A program is a path or a callable. Received: program={target!r} of type {type(target).__name__}."
            )
        name = _name_of(target)
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):  # builtins have no signature
            parameters = {}.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if needed:
            raise source.needs_arguments(name, needed)
        if inspect.iscoroutinefunction(target):
            raise UsageError(f"A program must be a plain function. Received: program={name!r}, which is an async function.")
        return cls(name, "callable", args, pickled=pickle_by_value(target, name), written=_written(target))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders in which a program writes relative paths: its working directory and its file's folder."""
        beside = self.folder
        not_written = [str(self.cwd), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
        return (self.cwd,) if any(beside.is_relative_to(folder) for folder in not_written) else (self.cwd, beside)

    @property
    def folder(self) -> Path:
        """Return the folder of the program's file, or the working directory for a callable."""
        return self.cwd if self.file is None else self.file.parent

    def hash_places(self) -> list[str]:
        """Return where its own source makes sets or asks for hashes: `train.py, line 9`, each."""
        return self._places(source.hashes)

    def listing_places(self) -> list[str]:
        """Return where its own source lists folders."""
        return self._places(source.lists_a_folder)

    def _places(self, is_one: Callable[[ast.expr], bool]) -> list[str]:
        file = self.file or self.written
        roots = (self.cwd, *([self.import_root] if self.import_root else []))
        return [] if file is None else source.places(file, roots, is_one)

    @property
    def imports(self) -> tuple[str, ...]:
        """Return what its hosts import in advance: matplotlib if its source names it, which otherwise takes 0.3 s each."""
        text = self.pickled if self.file is None else self.file.read_bytes()
        return ("matplotlib.pyplot",) if text is not None and b"matplotlib" in text else ()

    def start(self, path: PathMap = lambda path: path) -> Any:
        """Run it in this process, which is a host, to its very end: its threads and exit handlers included.

        Args:
            path: Where a file of the user lies for this run (a working copy, say).

        Returns:
            What the function returned; None for a script. `sys.exit()` and `sys.exit(0)` are success.

        Raises:
            SystemExit: When the program left with a code or a text.
            UsageError: When its function turns out not to be there.
        """
        atexit._clear()  # what the pre-loaded parent registered is its own affair, or would run once for every host
        install_edits(self.edits, path)
        _set_arguments(self, path)
        try:
            return _STARTERS[self.kind](self, path)
        except SystemExit as leave:
            if leave.code not in (None, 0):
                raise
            return None
        finally:  # what Python does between the last line of a program and the end of the process, in its order
            getattr(threading, "_shutdown", lambda: None)()  # waits for the program's threads and executors
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()


def _module_file(name: str, module: str, *, runnable: bool) -> Path:
    file = source.find_module_file(module, runnable)
    if file is not None and file.suffix == ".py":
        return file
    if file is not None:
        raise UsageError(f"A program's module must be Python source. Received: program={name!r}, whose file is {file.name!r}.")
    first, _, rest = module.partition(".")
    above = source.find_module_file(first, runnable=False) if rest else None
    if module.endswith(".py"):
        hint = f"A file is written without -m: {module!r}."
    elif above is not None and above.stem != "__init__":  # a module without a folder, as os of os.path
        raise UsageError(
            f"A program's module must have a file of its own. Received: program={name!r}, and {first!r} is no package. "
            "Name the module that the function is written in."
        )
    elif runnable and source.find_module_file(module, runnable=False) is not None:
        hint = "It is a package without a __main__ module: name the module in it."
    else:
        hint = f"It is looked for from the working directory, {str(Path.cwd())!r}, and where Python finds packages."
    raise UsageError(f"A program's module must be there. Received: program={name!r}. {hint}")


def _written(target: Any) -> Path | None:
    try:
        file = inspect.getsourcefile(inspect.unwrap(getattr(target, "func", target)))
    except TypeError:  # an object that can be called: its class is written somewhere
        file = inspect.getsourcefile(type(target)) if type(target).__module__ != "builtins" else None
    return Path(file) if file is not None and Path(file).is_file() else None


def _name_of(target: Any) -> str:
    inner = getattr(target, "func", target)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = getattr(inner, "__module__", None)
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def pickle_by_value(target: Callable[[], Any], name: str) -> bytes:
    """Pickle a callable together with what it refers to in its own module.

    Args:
        target: The callable.
        name: What messages call it.

    Returns:
        What `pickle.loads` makes a callable of, in a process that cannot import the caller's module.

    Raises:
        UsageError: When it refers to something that cannot be sent to another process.
    """
    from cloudpickle import register_pickle_by_value, unregister_pickle_by_value

    module = _module_to_copy(target)
    if module is not None:
        register_pickle_by_value(module)
    try:
        return to_bytes(_Sent(target, _names_of_annotations(target)))
    except Exception as error:  # objects refuse in many ways: TypeError, PicklingError, NotImplementedError, their own
        raise UsageError(
            f"A callable and its arguments must be sendable to another process. Received: program={name!r}, which is or refers "
            f"to something that is not ({type(error).__name__}: {error}). "
            "Make such objects (models, datasets, tensors, locks) inside the function."
        ) from error
    finally:
        if module is not None:
            unregister_pickle_by_value(module)


def _module_to_copy(target: Any) -> ModuleType | None:
    module = sys.modules.get(getattr(_inner(target), "__module__", None) or "")
    if module is None or module.__name__ == "__main__":  # __main__ goes by value anyway
        return None
    from cloudpickle import list_registry_pickle_by_value

    is_known = module.__name__ in list_registry_pickle_by_value()
    return None if is_known or not getattr(module, "__file__", None) else module


class _Sent:
    """Hold a callable with what its module's annotations name from elsewhere: no code refers to it, but autograph looks."""

    def __init__(self, target: Any, names: Mapping[str, Any]) -> None:
        self._sent = target, names

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._sent


def _received(target: Any, names: Mapping[str, Any]) -> Any:
    module_globals = getattr(_inner(target), "__globals__", {})
    for name, value in names.items():
        module_globals.setdefault(name, value)
    return target


def _inner(target: Any) -> Any:
    return inspect.unwrap(getattr(target, "func", target))


def _names_of_annotations(target: Any) -> dict[str, Any]:
    """Return classes and modules from elsewhere that a callable's module names in annotations."""
    module = sys.modules.get(getattr(_inner(target), "__module__", None) or "")
    values = {name: getattr(module, name) for name in _annotated(module) if hasattr(module, name)} if module is not None else {}
    return {name: value for name, value in values.items() if _is_from_elsewhere(value, getattr(module, "__name__", ""))}


@functools.lru_cache(maxsize=64)
def _annotated(module: ModuleType) -> tuple[str, ...]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # typed into a console
        return ()
    annotations = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    return tuple(sorted({part.id for hint in annotations if hint for part in ast.walk(hint) if isinstance(part, ast.Name)}))


def _is_from_elsewhere(value: Any, module: str) -> bool:
    own = getattr(value, "__module__", module) == module
    return isinstance(value, ModuleType) or (not own and (isinstance(value, type) or type(value).__module__ == "typing"))


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
    loader = source_loader("__main__", str(file))
    code = loader.source_to_code(loader.get_data(str(file)), str(program.file))
    exec(code, _main_module(str(file), loader, None).__dict__)


def _run_notebook(program: Program, path: PathMap) -> None:
    """Run the code cells in order, in one `__main__`; tracebacks and autograph find the source of a cell in linecache."""
    assert program.file is not None
    module = _main_module(None, None, None)
    module.__dict__["display"] = print  # which IPython provides
    for cell in cells_of(path(program.file), program.name, edited(str(program.file))):
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
    exec(code, _main_module(spec.origin, spec.loader, spec).__dict__)


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
    file = str(path(program.file))
    spec = importlib.util.spec_from_file_location(name, file, loader=source_loader(name, file))
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
