"""Watch a program's environment: TF_CONFIG stays that of the topology, and late settings are noticed."""

from __future__ import annotations

import json
import os
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from emulate.errors import UsageError
from gpudist_core.installed import foreign_backend

_KEPT = "TF_CONFIG"
_READ_AT_IMPORT = ("TF_", "KERAS_", "XLA_", "OMP_", "KMP_", "TF2_")
_READ_LATER = (  # by the runtime, at its first use or later, or by GPU code alone
    _KEPT,
    "TF_CPP_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_OPS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_",
)


def is_read_at_import(name: str) -> bool:
    """Return whether TensorFlow or Keras reads the variable at import, so that a later change has no effect."""
    return name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process must have before it imports TensorFlow."""
    return {name: value for name, value in environment.items() if is_read_at_import(name)}


class EnvironmentWatch:
    """Decide what happens when a program changes its environment.

    Args:
        tf_config: What TF_CONFIG is on this host of this topology.
        is_set: Whether it is there from the start; otherwise it is what a program gets that sets one of its own.
        note: Called with the code and the text of a note.
        needs_fresh_process: Called with the name and the new value (None where it is removed) of a variable that the
            imported TensorFlow has read already; it does not return. None where TensorFlow was not imported before the program.
    """

    def __init__(
        self,
        tf_config: str,
        is_set: bool,
        note: Callable[[str, str], None],
        needs_fresh_process: Callable[[str, str | None], None] | None,
    ) -> None:
        self._tf_config = tf_config
        self._is_set = is_set
        self._note = note
        self._needs_fresh_process = needs_fresh_process
        self._noted: set[str] = set()
        self._putenv, self._unsetenv = os.putenv, os.unsetenv

    def start(self) -> None:
        """Watch item assignment, `update`, `setdefault`, `putenv` and a whole new `os.environ` from now on."""
        watch = self

        class OsModule(ModuleType):
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, watch.replacement(value) if name == "environ" else value)

        os.environ.__class__ = _guarded(type(os.environ), self)
        os.putenv, os.unsetenv = self._put, self._unset
        sys.modules["os"].__class__ = OsModule

    def written(self, name: str, value: str) -> str:
        """Return the value that a variable gets in place of the program's."""
        if name == "KERAS_BACKEND" and (text := foreign_backend(value, "the program, in KERAS_BACKEND")):
            raise UsageError(text)
        if name != _KEPT:
            self._check(name, value)
            return value
        try:
            config = json.loads(value)
        except ValueError:
            config = None  # not for us to mend
        names_cluster = not isinstance(config, dict) or bool(config.get("cluster"))
        if value == self._tf_config or not (self._is_set or names_cluster):
            return value
        self._say(f"The program sets TF_CONFIG itself to {_short(value)}; each host got the topology's.")
        return self._tf_config

    def deleted(self, name: str) -> bool:
        """Return whether a variable may be removed."""
        if name == _KEPT:
            if self._is_set:
                self._say("The program removes TF_CONFIG; each host kept the topology's.")
            return not self._is_set
        self._check(name, None)
        return True

    def replacement(self, value: Any) -> Any:
        """Return the mapping to use in place of one that is assigned to `os.environ`."""
        if hasattr(value, "is_watched") or not isinstance(value, Mapping):
            return value
        replaced = _guarded(UserDict, self)(value)
        if self._is_set:
            replaced[_KEPT] = self._tf_config
        return replaced

    def _check(self, name: str, value: str | None) -> None:
        if self._needs_fresh_process is None or not is_read_at_import(name) or os.environ.get(name) == value:
            return
        from emulate.cluster.upstream import is_runtime_initialized

        # Once the program has started the runtime, the change comes too late in a process of its own as well.
        if not is_runtime_initialized() and not _is_written_by_library():
            self._needs_fresh_process(name, value)

    def _say(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note("tf-config", text)

    def _put(self, name: Any, value: Any) -> None:
        self._putenv(name, self.written(os.fsdecode(name), os.fsdecode(value)))

    def _unset(self, name: Any) -> None:
        if self.deleted(os.fsdecode(name)):
            self._unsetenv(name)


def _guarded(base: Any, watch: EnvironmentWatch) -> Any:
    """Return a subclass of a mapping that asks the watch before an item changes."""

    class Guarded(base):
        __slots__ = ()  # else Python refuses to change the class of os.environ
        is_watched = True

        def __setitem__(self, name: Any, value: Any) -> None:
            if isinstance(name, str) and isinstance(value, str):  # else the mapping itself says what is wrong
                value = watch.written(name, value)
            super().__setitem__(name, value)

        def __delitem__(self, name: Any) -> None:
            if not isinstance(name, str) or watch.deleted(name):
                super().__delitem__(name)

        def clear(self) -> None:
            for name in list(self):  # the inherited one goes on until nothing is left
                del self[name]

    return Guarded


def _is_written_by_library() -> bool:
    """Return whether TensorFlow or Keras itself writes the variable (as ParameterServerStrategy does)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "os", "collections.abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("tensorflow", "keras", "tf_keras")


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
