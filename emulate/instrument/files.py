"""Record what a program writes in shared places: outside of each run's own folders, and its checkpoints.

So is what it reads there that was written while the verification went on. What Python itself opens is seen by an audit hook,
which cannot be taken away again; TensorFlow and HDF5 open files past Python, so that their doors are watched one by one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

from emulate import upstream
from emulate.point import around, when_imported
from gpudist_core.state import PerThread

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_MODELS = (".keras", ".h5", ".hdf5")
MOST = 200
"""So many paths are told; a program that writes more elsewhere is known well enough."""


class Paths:
    """Report each shared path that this process writes or reads, and each checkpoint or saved model, once.

    Args:
        is_private: Whether a path is this run's own.
        tell: Called with each other path that is written, as text, and whether a file from before the verification lies there.
        tell_read: Called with each other file that is read and not from before, and whether this process has written it.
        tell_saved: Called with each path of a checkpoint or a model; the run's other hosts can see it.
        since: When the verification began, in seconds since the epoch.
    """

    def __init__(
        self,
        is_private: Callable[[str], bool],
        tell: Callable[[str, bool], None],
        tell_read: Callable[[str, bool], None],
        tell_saved: Callable[[str], None],
        since: float,
    ) -> None:
        self._is_private = is_private
        self._tell = tell
        self._tell_read = tell_read
        self._tell_saved = tell_saved
        self._since = since
        self._pid = os.getpid()
        self._known: set[str] = set()
        self._read: set[str] = set()
        self._saved: set[str] = set()
        self._is_busy = PerThread(False)

    def install(self) -> None:
        """Watch from now on, to the end of the process."""
        sys.addaudithook(self._audit)
        when_imported("tensorflow", self._watch_tensorflow)
        when_imported("h5py", self._watch_h5py)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        look = _LOOKS.get(event)
        if look is None or self._is_busy.value:
            return
        if event == "open" and _reads(args):
            self.seen_reading(args[0])
        for path in look(args):
            self.seen(path)

    def seen(self, path: Any, *, checkpoint: bool = False) -> None:
        """Note that a path, perhaps of a checkpoint, is about to be written."""
        with self._looking() as may_look:
            text = _absolute(path) if may_look else None
            if text is None:
                return
            if (checkpoint or text.endswith(_MODELS)) and text not in self._saved and len(self._saved) < MOST:
                self._saved.add(text)
                self._tell_saved(text)
            if text not in self._known and len(self._known) < MOST and not self._is_private(text):
                self._known.add(text)
                written = _written_at(text)
                self._tell(text, written is not None and written < self._since)

    def seen_reading(self, path: Any) -> None:
        """Note that a path is about to be read: a file, or a checkpoint without the suffixes of its files."""
        with self._looking() as may_look:
            written = _written_at(path) if may_look else None
            if written is None or written < self._since:  # as nearly all that a program reads
                return
            text = _absolute(path)
            if text is not None and text not in self._read and len(self._read) < MOST and not self._is_private(text):
                self._read.add(text)
                self._tell_read(text, text in self._known)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[bool]:
        """Have what gpudist opens in this block not seen; yield False where it is in one, or a child of the program asks."""
        if self._is_busy.value or os.getpid() != self._pid:
            yield False
            return
        # A path may be one that the program itself cannot open either.
        with self._is_busy.set(True), contextlib.suppress(OSError, ValueError):
            yield True

    def _watch_tensorflow(self) -> None:
        for owner, name, path_of in upstream.file_writers():
            self._watch(owner, name, path_of, self.seen)
        self._watch(*upstream.checkpoint_writer(), functools.partial(self.seen, checkpoint=True))
        for owner, name, path_of in upstream.file_readers():
            self._watch(owner, name, path_of, self.seen_reading)

    def _watch_h5py(self) -> None:
        file_class = importlib.import_module("h5py").File
        # What was wrapped last comes first: a file that is opened for both is read as others have left it.
        for modes, seen in (("r+", "w", "w-", "x", "a"), self.seen), (("r", "r+", "a"), self.seen_reading):
            self._watch(file_class, "__init__", functools.partial(_h5_path, modes), seen)

    def _watch(self, owner: Any, name: str, path_of: upstream.PathOf, seen: Callable[[Any], None]) -> None:
        @around(owner, name)
        def watched(original: Any, *args: Any, **kwargs: Any) -> Any:
            path = path_of(args, kwargs)
            if path is not None:
                seen(path)
            return original(*args, **kwargs)


def _h5_path(modes: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the path of an HDF5 file opened in one of these modes, or None."""
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "r")
    return (args[1] if len(args) > 1 else kwargs.get("name")) if mode in modes else None


def _written_at(path: Any) -> float | None:
    """Return when a file or a checkpoint was written, or None."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    for name in (os.fsdecode(path), f"{os.fsdecode(path)}.index"):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(name)
            return status.st_mtime if stat.S_ISREG(status.st_mode) else None
    return None


def _absolute(path: Any) -> str | None:
    """Return the path without symbolic links, or None for a file without interest."""
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


def _reads(args: tuple[Any, ...]) -> bool:
    """Return whether the file is read. A caller that creates a missing file wants to lock it or to append to it."""
    path, _, flags = args
    if not isinstance(flags, int) or isinstance(path, int):
        return False
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & (os.O_TRUNC | os.O_CREAT | os.O_DIRECTORY)


def _made(args: tuple[Any, ...]) -> Iterator[Any]:
    path = _in_folder(args[0], args[2])
    if not isinstance(path, int) and not os.path.exists(path):  # makedirs(exist_ok=True) asks in vain
        yield path


def _in_folder(path: Any, descriptor: int) -> Any:
    """Return a path as the process sees it, not as it is in the folder of an open descriptor (-1: in the working directory).

    The audit event of `os.open` does not have its `dir_fd` (Python 3.14).
    """
    return path if descriptor < 0 or isinstance(path, int) else os.path.join(f"/proc/self/fd/{descriptor}", os.fsdecode(path))


_LOOKS: dict[str, Callable[[tuple[Any, ...]], Iterator[Any]]] = {
    "open": _opened,
    "os.mkdir": _made,
    "os.rename": lambda args: map(_in_folder, args[:2], args[2:]),
    "os.link": lambda args: iter([_in_folder(args[1], args[3])]),
    "os.symlink": lambda args: iter([_in_folder(args[1], args[2])]),
    "os.remove": lambda args: iter([_in_folder(*args)]),
    "os.truncate": lambda args: iter(args[:1]),
    "sqlite3.connect": lambda args: iter(args[:1]),
}
