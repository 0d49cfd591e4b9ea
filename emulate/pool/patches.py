"""Functions and classes that a job exchanged for others: what tests call monkeypatching, when it is not undone."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_KINDS = (FunctionType, BuiltinFunctionType, type)
_LARGE = ("tensorflow", "keras", "numpy", "tf_keras")
_PUBLIC = ("tensorflow._api.v2.", "tensorflow.keras", "keras.", "numpy.random", "numpy.linalg")
_INNER = ("tensorflow.python", "keras.src", "tf_keras.src", "__internal__", ".compat.", "raw_ops", "numpy.")


class Patches:
    """Which function or class stood where, in modules and in the public classes of TensorFlow and Keras.

    Of the large libraries it is what they make public; of all other modules, what a program imports by name: those of Python,
    and the others' topmost.
    """

    def __init__(self) -> None:
        holders = {id(holder): (name, holder) for name, holder in _holders()}  # a class is public in many places
        self._before = [_Holder(name, holder) for name, holder in holders.values()]

    def check(self) -> list[str]:
        """What stands for something else now."""
        changed = {name for holder in self._before for name in holder.changed()}
        return [f"it replaced {', '.join(sorted(changed))}"] if changed else []


class _Holder:
    """A module or a class, and what stood in it."""

    def __init__(self, name: str, holder: Any) -> None:
        self._name = name
        self._holder = holder
        self._functions = _functions(holder)
        self._values = tuple(self._functions.values())
        self._all = operator.itemgetter(*self._functions) if len(self._functions) > 1 else None
        self._size = len(vars(holder))

    def changed(self) -> list[str]:
        """The functions that are others now; of a class, those too that hide what it inherited."""
        now = vars(self._holder)
        if self._is_unchanged(now):
            return []
        names = [key for key, was in self._functions.items() if now.get(key) is not was]
        if isinstance(self._holder, type):
            names += _functions(self._holder).keys() - self._functions.keys()
        return [f"{self._name}.{name}" for name in names]

    def _is_unchanged(self, now: Any) -> bool:
        """In most nothing at all has changed, which is seen without looking at names."""
        if isinstance(self._holder, type) and len(now) != self._size:
            return False
        if self._all is None:
            return all(now.get(name) is value for name, value in self._functions.items())
        try:
            return all(map(operator.is_, self._values, self._all(now)))
        except KeyError:
            return False


def _functions(holder: Any) -> dict[str, Any]:
    items = list(vars(holder).items())
    if isinstance(holder, type):
        return {name: value for name, value in items if callable(value) or isinstance(value, property)}
    of_numpy = holder.__name__.partition(".")[0] == "numpy"  # whose functions are objects of kinds of their own
    return {name: value for name, value in items if isinstance(value, _KINDS) or (of_numpy and callable(value))}


def _holders() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _is_watched(name):
            yield name, module
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and str(value.__module__).partition(".")[0] in _LARGE:
                    yield f"{name}.{key}", value


def _is_watched(name: str) -> bool:
    root, *below = name.split(".")
    if root not in _LARGE:
        return len(below) <= (root in sys.stdlib_module_names) and not name.startswith("_") and "._" not in name
    if name in _LARGE:
        return True
    return name.startswith(_PUBLIC) and not any(part in name for part in _INNER if part != "numpy.")
