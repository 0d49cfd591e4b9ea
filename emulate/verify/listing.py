"""List folders in another order on later hosts, as hosts with separate disks do."""

from __future__ import annotations

import functools
import glob
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import TracebackType
from typing import Any, TypeVar, final

from emulate.imports import when_imported

Entry = TypeVar("Entry")

_HOSTS = 30
"""Every k-th file goes to another host where files are moved on by a number that has no factor in common with k."""
_KEPT = (
    (getattr(pathlib, "_NormalAccessor", None), "listdir"),
    (getattr(pathlib, "_NormalAccessor", None), "scandir"),
    (getattr(glob, "_GlobberBase", None), "scandir"),
    (getattr(glob, "_StringGlobber", None), "scandir"),
)
"""Places (object, name) of the listing functions in the standard library: pathlib in Python 3.10, glob from 3.13 on."""


def in_another_order(entries: Iterable[Entry], name: Callable[[Entry], str] = str) -> list[Entry]:
    """Return a folder's entries in an order in which most have another place, also among those with their suffix.

    Args:
        entries: As the file system lists them.
        name: Of an entry.

    Returns:
        All of them.
    """
    by_ending: dict[str, list[Entry]] = {}
    for entry in entries:
        by_ending.setdefault(os.path.splitext(name(entry))[1], []).append(entry)
    return [entry for group in by_ending.values() for entry in _moved_on(group)]


def _moved_on(entries: list[Entry]) -> list[Entry]:
    """Reorder entries: about half of the last ones come first, so blocks of entries differ too."""
    by = next(number for number in count(max(1, len(entries) // 2)) if math.gcd(number, _HOSTS) == 1) % len(entries) or 1
    return entries[by:] + entries[:by]


def list_in_another_order() -> None:
    """Make os, glob, pathlib and TensorFlow list so in this process, from now on."""
    listdir, scandir = _listing(os.listdir), _scanning(os.scandir)
    os.listdir, os.scandir = listdir, scandir
    for owner, attribute in _KEPT:
        if attribute in vars(owner or object):
            setattr(owner, attribute, staticmethod(listdir if attribute == "listdir" else scandir))
    when_imported("tensorflow", _of_tensorflow)


def _of_tensorflow() -> None:
    import tensorflow as tf

    gfile = tf.io.gfile
    gfile.listdir, gfile.glob, gfile.walk = _listing(gfile.listdir), _listing(gfile.glob), _walking(gfile.walk)


def _listing(original: Callable[..., Any]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def listed(*args: Any, **kwargs: Any) -> list[Any]:
        return in_another_order(original(*args, **kwargs), os.fsdecode)

    return listed


def _walking(original: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(original)
    def walk(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for top, folders, files in original(*args, **kwargs):
            for names in (folders, files):
                names[:] = in_another_order(names)
            yield top, folders, files

    return walk


def _scanning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scandir(*args: Any, **kwargs: Any) -> _Entries:
        with original(*args, **kwargs) as entries:
            return _Entries(in_another_order(entries, lambda entry: os.fsdecode(entry.name)))

    return scandir


@final
class _Entries:
    """Provide what `os.scandir` returns: an iterator, and the context that closes it."""

    def __init__(self, entries: list[os.DirEntry[Any]]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._left = iter(())
