"""What a program writes where others can meet it: outside of the folders that each run has to itself, and its checkpoints.

Python's own writes are seen by an audit hook, which cannot be taken away again; TensorFlow and HDF5 write past Python,
so that their doors are watched one by one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from emulate.imports import when_imported
from emulate.probe import upstream

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_MODELS = (".keras", ".h5", ".hdf5")
MOST = 200
"""So many paths are told; a program that writes more elsewhere is known well enough."""


class Writes:
    """Tells each path once that this process writes and that other runs can see, and each checkpoint or saved model.

    Args:
        is_private: Whether a path is this run's own.
        tell: Called with each other path, as text.
        tell_saved: Called with each path of a checkpoint or a model; the run's other hosts can see it.
    """

    def __init__(
        self, is_private: Callable[[str], bool], tell: Callable[[str], None], tell_saved: Callable[[str], None]
    ) -> None:
        self._is_private = is_private
        self._tell = tell
        self._tell_saved = tell_saved
        self._pid = os.getpid()
        self._known: set[str] = set()
        self._saved: set[str] = set()
        self._busy = threading.local()

    def install(self) -> None:
        """Watch from now on, to the end of the process."""
        sys.addaudithook(self._audit)
        when_imported("tensorflow", self._watch_tensorflow)
        when_imported("h5py", self._watch_h5py)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        look = _LOOKS.get(event)
        if look is None or getattr(self._busy, "now", False):
            return
        for path in look(args):
            self.seen(path)

    def seen(self, path: Any, *, checkpoint: bool = False) -> None:
        """A path is about to be written, that of a checkpoint perhaps."""
        if getattr(self._busy, "now", False) or os.getpid() != self._pid:
            return
        self._busy.now = True
        try:
            text = _absolute(path)
            if text is None:
                return
            if (checkpoint or text.endswith(_MODELS)) and text not in self._saved and len(self._saved) < MOST:
                self._saved.add(text)
                self._tell_saved(text)
            if text not in self._known and len(self._known) < MOST and not self._is_private(text):
                self._known.add(text)
                self._tell(text)
        except (OSError, ValueError):  # a path that the program itself cannot open either
            pass
        finally:
            self._busy.now = False

    def _watch_tensorflow(self) -> None:
        for owner, name, path_of in upstream.file_writers():
            self._watch(owner, name, path_of)
        self._watch(*upstream.checkpoint_writer(), checkpoint=True)

    def _watch_h5py(self) -> None:
        file_class = importlib.import_module("h5py").File
        self._watch(file_class, "__init__", lambda args, kwargs: args[1] if _h5_mode(args, kwargs) != "r" else None)

    def _watch(self, owner: Any, name: str, path_of: upstream.PathOf, *, checkpoint: bool = False) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            path = path_of(args, kwargs)
            if path is not None:
                self.seen(path, checkpoint=checkpoint)
            return original(*args, **kwargs)

        setattr(owner, name, watched)


def _h5_mode(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("mode", args[2] if len(args) > 2 else "r")


def _absolute(path: Any) -> str | None:
    """The path without symbolic links, None for what is no file of interest."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
        return None
    text = os.path.realpath(path)
    if text.startswith(_SYSTEM) or "/__pycache__/" in text or text.endswith("/__pycache__"):
        return None
    return text


def _opened(args: tuple[Any, ...]) -> Iterator[Any]:
    path, _, flags = args
    if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
        yield path


def _made(args: tuple[Any, ...]) -> Iterator[Any]:
    if not isinstance(args[0], int) and not os.path.exists(args[0]):  # makedirs(exist_ok=True) asks in vain
        yield args[0]


_LOOKS: dict[str, Callable[[tuple[Any, ...]], Iterator[Any]]] = {
    "open": _opened,
    "os.mkdir": _made,
    "os.rename": lambda args: iter(args[:2]),
    "os.link": lambda args: iter(args[1:2]),
    "os.symlink": lambda args: iter(args[1:2]),
    "os.remove": lambda args: iter(args[:1]),
    "os.truncate": lambda args: iter(args[:1]),
    "sqlite3.connect": lambda args: iter(args[:1]),
}
