"""Undo what tests call monkeypatching: functions and classes that a job replaced."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_KINDS = (FunctionType, BuiltinFunctionType, type)
_METHODS = (property, classmethod, staticmethod)
_LARGE = ("tensorflow", "keras", "numpy", "tf_keras")
_PUBLIC = ("tensorflow._api.v2.", "tensorflow.keras", "keras.", "numpy.random", "numpy.linalg")
_INNER = ("tensorflow.python", "keras.src", "tf_keras.src", "__internal__", ".compat.", "raw_ops", "numpy.")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE

_values = operator.methodcaller("values")


class Holder:
    """Hold a module or a class, and its content.

    Args:
        name: What messages call it.
        holder: The module or the class.

    Attributes:
        holder: The same.
        space: What stands in it now.
        functions: Its functions and classes then, by name.
        values: All that stood in it, where it is a class.
    """

    def __init__(self, name: str, holder: Any) -> None:
        self._name = name
        self.holder = holder
        self.space: Mapping[str, Any] = vars(holder)
        self.functions = _functions(holder)
        self._was = tuple(self.functions.values())
        self._all = operator.itemgetter(*self.functions) if len(self.functions) > 1 else None
        self._size = len(self.space)
        self.values = tuple(self.space.values()) if isinstance(holder, type) else ()

    @property
    def root(self) -> str:
        """Return its top-level package."""
        name = self.holder.__module__ if isinstance(self.holder, type) else self.holder.__name__
        return str(name).partition(".")[0]

    def is_as_it_was(self) -> bool:
        """Return whether it has the same functions and nothing new; a class, the same things in the same order."""
        if len(self.space) != self._size:
            return False
        return all(map(operator.is_, self.values, self.space.values())) if self.values else self._is_unchanged()

    def changed(self) -> list[str]:
        """Return the functions that were replaced; for a class, also those that hide inherited ones."""
        if self._is_unchanged():
            return []
        names = [key for key, was in self.functions.items() if self.space.get(key) is not was]
        if isinstance(self.holder, type):
            names += _functions(self.holder).keys() - self.functions.keys()
        return [f"{self._name}.{name}" for name in names]

    def _is_unchanged(self) -> bool:
        """Return whether nothing has changed, without a look at the names."""
        if isinstance(self.holder, type) and len(self.space) != self._size:
            return False
        if self._all is None:
            return all(self.space.get(name) is value for name, value in self.functions.items())
        try:
            return all(map(operator.is_, self._was, self._all(self.space)))
        except KeyError:
            return False


class Patches:
    """Hold which function or class was where, in modules and in classes.

    Args:
        holders: Those to look at.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        holders = list(holders)
        self._each = [one for one in holders if not isinstance(one.holder, type)]
        self._watch([one for one in holders if isinstance(one.holder, type)])

    def _watch(self, classes: list[Holder]) -> None:
        self._steady = classes
        self._spaces = [one.space for one in classes]
        self._values = list(chain.from_iterable(one.values for one in classes))

    def check(self) -> list[str]:
        """Return what was replaced."""
        if not self._are_steady():  # classes that keep count of something, above all: from now on one by one
            self._each += [one for one in self._steady if not one.is_as_it_was()]
            self._watch([one for one in self._steady if one.is_as_it_was()])
        changed = {name for holder in self._each for name in holder.changed()}
        return [f"it replaced {', '.join(sorted(changed))}"] if changed else []

    def _are_steady(self) -> bool:
        """Return whether nothing has changed in nearly all classes, in one comparison."""
        now = chain.from_iterable(map(_values, self._spaces))
        return sum(map(len, self._spaces)) == len(self._values) and all(map(operator.is_, self._values, now))


def watched(known: Iterable[Holder] = ()) -> list[Holder]:
    """Return the modules and classes in which tests replace functions.

    Of the large libraries it is what they make public; of all other modules, what a program imports by name: those of Python
    with their classes, and the others' topmost.

    Args:
        known: Found earlier. They serve again where nothing has changed: what is new is looked at by every collection of
            garbage, and these are many.

    Returns:
        How they are now.
    """
    holders = {id(holder): (name, holder) for name, holder in _holders()}  # a class is public in many places
    before = {id(one.holder): one for one in known}
    return [_again(before.get(key)) or Holder(name, holder) for key, (name, holder) in holders.items()]


def _again(known: Holder | None) -> Holder | None:
    return known if known is not None and known.is_as_it_was() else None


def of_large_libraries(holders: Iterable[Holder]) -> Iterator[Holder]:
    """Yield those that belong to TensorFlow, Keras and NumPy."""
    return (one for one in holders if one.root in _LARGE)


def _functions(holder: Any) -> dict[str, Any]:
    items = list(vars(holder).items())
    if isinstance(holder, type):
        return {name: value for name, value in items if callable(value) or isinstance(value, _METHODS)}
    of_numpy = holder.__name__.partition(".")[0] == "numpy"  # whose functions are objects of kinds of their own
    return {name: value for name, value in items if isinstance(value, _KINDS) or (of_numpy and callable(value))}


def _holders() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _is_watched(name):
            yield name, module
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and _can_be_patched(key, value):
                    yield f"{name}.{key}", value


def _can_be_patched(key: str, cls: type) -> bool:
    if not cls.__flags__ & _HEAP or cls.__flags__ & _IMMUTABLE:
        return False
    root = str(cls.__module__).partition(".")[0]
    return root in _LARGE or (root in sys.stdlib_module_names and not key.startswith("_"))


def _is_watched(name: str) -> bool:
    root, *below = name.split(".")
    if root not in _LARGE:
        return len(below) <= (root in sys.stdlib_module_names) and not name.startswith("_") and "._" not in name
    if name in _LARGE:
        return True
    return name.startswith(_PUBLIC) and not any(part in name for part in _INNER if part != "numpy.")
