"""Compute the logs for callbacks on read: nobody reads the logs of most steps."""

from __future__ import annotations

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

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self.computed(), name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name."""
        return dict.get(self.computed(), name, default)

    def items(self) -> Any:
        """Return names and values."""
        return dict.items(self.computed())

    def values(self) -> Any:
        """Return the values."""
        return dict.values(self.computed())

    def pop(self, *args: Any) -> Any:
        """Remove a value and return it."""
        return dict.pop(self.computed(), *args)

    def popitem(self) -> Any:
        """Remove any value and return it."""
        return dict.popitem(self.computed())

    def setdefault(self, *args: Any) -> Any:
        """Return the value of a name, after setting it if it was missing."""
        return dict.setdefault(self.computed(), *args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set values."""
        dict.update(self.computed(), *args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self.computed(), name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self.computed(), name)

    def copy(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def as_python(value: Any) -> Any:
    """Return a number as a Python float, or an array, which some metrics return, as a NumPy array.

    Args:
        value: A tensor or a number.

    Returns:
        The value.
    """
    array = value.numpy() if hasattr(value, "numpy") else value
    return float(array) if getattr(array, "shape", ()) == () and not isinstance(array, str) else array
