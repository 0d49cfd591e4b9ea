"""Remove stand-ins for modules that a job put into `sys.modules`."""

from __future__ import annotations

import operator
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_OF_EXTENSIONS = ("_", "cython_runtime")  # what C code shares by such modules


class Modules:
    """Hold the modules at one moment. Modules that a job imports stay; stand-ins are removed."""

    def __init__(self) -> None:
        self._seen = set(sys.modules)
        self._before = dict(sys.modules)

    def restore(self) -> list[str]:
        """Put the real ones back; why that is not enough."""
        new = sys.modules.keys() - self._seen
        made_up = _made_up(new)
        self._seen |= new - made_up
        hidden = self._hidden()
        for name in made_up:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        if (made_up or hidden) and any(map(_is_real, new - made_up)):
            # It may be an imported module that put them there, which does not do so a second time.
            return [f"it put stand-ins for modules into sys.modules: {', '.join(sorted({*made_up, *hidden}))}"]
        return []

    def _hidden(self) -> dict[str, ModuleType]:
        """Return modules that were replaced by something that is no module. Modules that were re-imported stay."""
        if all(map(operator.is_, self._before.values(), map(sys.modules.get, self._before))):
            return {}
        changed = [name for name, was in self._before.items() if sys.modules.get(name) is not was]
        hidden = {name: self._before[name] for name in changed if name in sys.modules and not _is_real(name)}
        for name in changed:
            if name not in hidden:
                del self._before[name]
        return hidden


def _made_up(names: set[str]) -> set[str]:
    """Return the modules that no import has made: an import leaves a spec with the module's name, except inside extensions."""
    found: set[str] = set()
    for name in sorted(names):  # parents first
        module = sys.modules.get(name)
        parent = name.rpartition(".")[0]
        is_own_kind = not issubclass(type(module), ModuleType)
        may_be = is_own_kind or parent in found or not (parent or name.startswith(_OF_EXTENSIONS))
        if may_be and not _is_real(name):
            found.add(name)
    return found


def _is_real(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return isinstance(spec, ModuleSpec) and spec.name == name
