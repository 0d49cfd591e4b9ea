"""Functions and classes that a job exchanged for others: what tests call monkeypatching, when it is not undone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_KINDS = (FunctionType, BuiltinFunctionType, type)
_LARGE = ("tensorflow", "keras", "numpy", "tf_keras")
_PUBLIC = ("tensorflow._api.v2.", "keras.api.", "keras._tf_keras.", "numpy.random", "numpy.linalg", "tensorflow.keras")
_INNER = ("tensorflow.python", "keras.src", "tf_keras.src", "__internal__", ".compat.", "raw_ops", "numpy.")


class Patches:
    """Which function or class stood where, in modules and in the public classes of TensorFlow and Keras.

    Of the large libraries it is what they make public; of all other modules, everything.
    """

    def __init__(self) -> None:
        holders = {id(holder): (name, holder) for name, holder in _holders()}  # a class is public in many places
        self._before = [(name, holder, _functions(holder), len(vars(holder))) for name, holder in holders.values()]

    def check(self) -> list[str]:
        """What stands for something else now."""
        changed: list[str] = []
        for name, holder, before, size in self._before:
            now = vars(holder)
            changed += [f"{name}.{key}" for key, was in before.items() if id(now.get(key)) != was]
            if isinstance(holder, type) and len(now) > size:  # what a class inherited may be hidden
                changed += [f"{name}.{key}" for key in _functions(holder).keys() - before.keys()]
        return [f"it replaced {', '.join(sorted(set(changed)))}"] if changed else []


def _functions(holder: Any) -> dict[str, int]:
    """By identity: what is held here must not keep anything alive."""
    items = list(vars(holder).items())
    if isinstance(holder, type):
        return {name: id(value) for name, value in items if callable(value) or isinstance(value, property)}
    return {name: id(value) for name, value in items if isinstance(value, _KINDS)}


def _holders() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _is_watched(name):
            yield name, module
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and str(value.__module__).partition(".")[0] in _LARGE:
                    yield f"{name}.{key}", value


def _is_watched(name: str) -> bool:
    root = name.partition(".")[0]
    if name in _LARGE or root not in _LARGE:
        return True
    return name.startswith(_PUBLIC) and not any(part in name for part in _INNER if part != "numpy.")
