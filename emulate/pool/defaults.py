"""Restore the default arguments of functions of TensorFlow and Keras, which a job may change."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from emulate.pool.patches import Holder, of_large_libraries

_defaults = operator.attrgetter("__defaults__")


class Defaults:
    """Hold the defaults of functions and methods at one moment.

    Args:
        holders: The modules and classes that they stand in.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        found = {id(one): one for holder in of_large_libraries(holders) for one in _own_functions(holder)}
        self._functions = list(found.values())
        self._values = [one.__defaults__ for one in self._functions]
        self._named = [(one, one.__kwdefaults__, dict(one.__kwdefaults__)) for one in self._functions if one.__kwdefaults__]

    def restore(self) -> list[str]:
        """Put them back."""
        if not all(map(operator.is_, self._values, map(_defaults, self._functions))):
            for function, values in zip(self._functions, self._values, strict=True):
                function.__defaults__ = values
        for function, named, copied in self._named:
            if function.__kwdefaults__ is not named or not _same(named, copied):
                named.clear()
                named.update(copied)
                function.__kwdefaults__ = named
        return []


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))


def _own_functions(holder: Holder) -> Iterable[FunctionType]:
    return (one for one in holder.functions.values() if isinstance(one, FunctionType))
