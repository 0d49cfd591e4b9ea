"""Compute the logs for callbacks on read: nobody reads the logs of most steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Logs(dict[str, Any]):
    """Hold the numbers of a step by name. The values are computed when the first one is read.

    Args:
        names: The names.
        read: A function that computes the values.
    """

    def __init__(self, names: Iterable[str], read: Callable[[], dict[str, Any]]) -> None:
        super().__init__(dict.fromkeys(names))
        self._read: Callable[[], dict[str, Any]] | None = read

    def computed(self) -> Logs:
        """Return these logs, with their values."""
        if self._read is not None:
            read, self._read = self._read, None
            super().update({name: as_python(value) for name, value in read().items()})
        return self

    def __iter__(self) -> Iterator[str]:
        # Its own, so that dict(logs) and {**logs} ask for the values.
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def _of_computed(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(self: Logs, *args: Any, **kwargs: Any) -> Any:
        return method(self.computed(), *args, **kwargs)

    return call


_CHANGING = ("__delitem__", "__setitem__", "pop", "popitem", "setdefault", "update")
for _name in ("__getitem__", "__or__", "__repr__", "copy", "get", "items", "values", *_CHANGING):
    setattr(Logs, _name, _of_computed(_name))


def as_python(value: Any) -> Any:
    """Return a number as a Python float, or an array, which some metrics return, as a NumPy array.

    Args:
        value: A tensor or a number.

    Returns:
        The value.
    """
    array = value.numpy() if hasattr(value, "numpy") else value
    return float(array) if getattr(array, "shape", ()) == () and not isinstance(array, str) else array
