"""Import a module when it is first used; run an action once a module has been imported, now or later."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Later:
    """Import a module when one of its names is first used.

    Args:
        name: The module's full name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


tf: Any = Later("tensorflow")
"""TensorFlow, for its names; whoever changes one of them takes the module. To import emulate must import no TensorFlow."""


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` now if the module is imported already, else right after its import has finished.

    Args:
        name: The module's full name, `tensorflow` say.
        action: What to do, without arguments. It runs once.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action()
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.actions.append(action)
            return
    sys.meta_path.insert(0, _Finder(name, [action]))


class _Finder(importlib.abc.MetaPathFinder):
    """Let the other finders find the module, and let its loader call the actions at the end."""

    def __init__(self, name: str, actions: list[Callable[[], None]]) -> None:
        self.name = name
        self.actions = actions
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A program may look for the module without importing it, so the finder stays until the import.
        if fullname != self.name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in self._finder.actions:  # the import, or an action, may have added more: TensorFlow is imported by Keras
            action()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
