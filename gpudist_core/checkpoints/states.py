"""Encode nested states of numbers, texts and arrays as JSON with the arrays beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from gpudist_core.errors import UsageError

_ARRAY = "$array"


class HasState(Protocol):
    """Have a state that JSON and arrays can hold: as a `Pipeline` does, or an object of the user."""

    def state(self) -> Any:
        """Return the state: see `encode`."""

    def restore(self, state: Any) -> None:
        """Restore what `state` returned."""


def encode(value: Any, name: str, keep: Callable[[str, np.ndarray[Any, Any]], None]) -> Any:
    """Encode a state as JSON.

    Args:
        value: Dicts with text keys, lists, tuples, numbers, texts, None, NumPy arrays and tensors.
        name: Its place, for the arrays' names and for messages.
        keep: A function that is called with the name and the values of each array.

    Returns:
        A value that JSON supports; tuples become lists.

    Raises:
        UsageError: For anything else.
    """
    if isinstance(value, Mapping):
        # As in a JSON pointer: {"a/b": ...} and {"a": {"b": ...}} are two arrays.
        return {
            _text(key, name): encode(inner, f"{name}/{key.replace('~', '~0').replace('/', '~1')}", keep)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [encode(inner, f"{name}/{i}", keep) for i, inner in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    values = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if values.dtype.kind in "OSUM" or values.dtype.hasobject:
        raise UsageError(
            "A state must consist of numbers, texts, lists, dicts and numeric arrays",
            "Return another form of it in state().",
            place=name,
            type=type(value).__name__,
        )
    keep(name, values)
    return {_ARRAY: name}


def decode(value: Any, array: Callable[[str], np.ndarray[Any, Any]]) -> Any:
    """Decode a state from `encode`. Lists stay lists.

    Args:
        value: The result of `encode`.
        array: A function that returns each array by its name.

    Returns:
        The state.
    """
    if isinstance(value, dict):
        return array(value[_ARRAY]) if set(value) == {_ARRAY} else {key: decode(inner, array) for key, inner in value.items()}
    return [decode(inner, array) for inner in value] if isinstance(value, list) else value


def has_state(value: Any) -> bool:
    """Return whether an object has `state()` and `restore(state)`."""
    return callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None))


def _text(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise UsageError("The keys of a state must be texts", "Return another form of it in state().", place=name, key=key)
    return key
