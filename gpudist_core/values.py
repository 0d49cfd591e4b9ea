"""Check numbers that a user passes (Python or NumPy numbers, but no bool), and what a dtype can hold."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

import numpy as np

from gpudist_core.errors import UsageError


def is_whole(value: Any, least: float = -math.inf) -> TypeGuard[int]:
    """Return whether a value is an integer that is at least `least`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_finite(value: Any, least: float = -math.inf) -> TypeGuard[float]:
    """Return whether a value is a finite number that is at least `least`."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= least


def check_choice(possible: tuple[str, ...], **argument: str) -> None:
    """Refuse an argument that is none of the possible ones.

    Args:
        possible: The possible values.
        **argument: The value, under its name.

    Raises:
        UsageError: If it is another one.
    """
    [(name, value)] = argument.items()
    if value not in possible:
        raise UsageError(f"{name} must be {' or '.join(map(repr, possible))}", **argument)


def in_type(values: Any, kind: Any) -> Any:
    """Convert an array to another dtype if that dtype can hold all its values.

    An integer dtype cannot hold 0.5, and int8 cannot hold 300. Floats are rounded.

    Args:
        values: An array.
        kind: The NumPy dtype; `object` for strings.

    Returns:
        The converted array (the same object if the dtype is equal), or None if the dtype cannot hold all values.
    """
    if kind is object:
        return values if all(isinstance(value, (str, bytes)) for value in values.flat) else None
    if values.dtype.kind in "OSUM" or (values.dtype.kind == "c" and np.dtype(kind).kind != "c"):
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        converted = values.astype(kind, copy=False)
        return converted if converted is values or converted.dtype.kind not in "iub" or (converted == values).all() else None
