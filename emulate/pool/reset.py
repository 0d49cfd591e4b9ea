"""Undo, between the jobs of one host, what pytest's users expect to be undone between tests."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulate.pool import upstream


class Reset:
    """Hold the environment, the folders and Keras's dtype policy of a host at one moment, and restore them later."""

    def __init__(self) -> None:
        self._environ = os.environ
        self._environment = dict(os.environ)
        self._cwd = os.getcwd()
        self._temporary = Path(os.environ["TMPDIR"])
        self._kept = self._files()
        self._policy = _dtype_policy()

    def undo(self) -> None:
        """Restore them, forget seeds, clear Keras's session, and empty the folder for temporary files."""
        self._restore_environment()
        os.chdir(self._cwd)
        tempfile.tempdir = None
        forget_seeds()
        _clear_sessions()
        if self._policy is not None and _dtype_policy() != self._policy:
            sys.modules["keras"].config.set_dtype_policy(self._policy)
        self._empty_folder()  # last: Keras's session may have held files of it open

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Leave alone, in a later `undo`, what the block changes in the environment and in the folder for temporary files."""
        before = dict(os.environ)
        files = self._files()
        try:
            yield
        finally:
            self._kept |= self._files() - files
            for name in before.keys() | os.environ.keys():
                value = os.environ.get(name)
                if value is None:
                    self._environment.pop(name, None)
                elif value != before.get(name):
                    self._environment[name] = value

    def _files(self) -> set[str]:
        return {entry.name for entry in self._temporary.iterdir()}

    def _restore_environment(self) -> None:
        os.environ = self._environ  # noqa: B003 - a job may have assigned another mapping
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _empty_folder(self) -> None:
        for entry in self._temporary.iterdir():
            if entry.name in self._kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def forget_seeds() -> None:
    """Reset the generators of Python, NumPy and TensorFlow to the unseeded state after a start."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(None)
        upstream.forget_generator()


def _clear_sessions() -> None:
    """Forget Keras's layer names, default graph and seeds, and collect garbage."""
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.clear_session()
    upstream.clear_legacy_session()


def _dtype_policy() -> Any:
    """Return Keras's global dtype policy, which is part of the session that is cleared; None before Keras is imported."""
    keras = sys.modules.get("keras")
    return None if keras is None else keras.config.dtype_policy()
