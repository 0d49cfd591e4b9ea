"""What a value is, where a user gives a number: of Python or NumPy, and never a truth value; and what a data type holds."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

import numpy as np


def is_whole(value: Any, least: float = -math.inf) -> TypeGuard[int]:
    """Whether a value is a whole number, not below another."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_finite(value: Any, least: float = -math.inf) -> TypeGuard[float]:
    """Whether a value is a finite number, not below another."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= least


def in_type(values: Any, kind: Any) -> Any:
    """An array's values in another data type: a whole number cannot hold 0.5, nor int8 300. Floats are rounded.

    Args:
        values: An array.
        kind: The NumPy data type; `object` for strings.

    Returns:
        The array in that type, itself where it has it; None where that does not hold all of them.
    """
    if kind is object:
        return values if all(isinstance(value, (str, bytes)) for value in values.flat) else None
    if values.dtype.kind in "OSUM" or (values.dtype.kind == "c" and np.dtype(kind).kind != "c"):
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.astype(kind, copy=False)
        return found if found is values or found.dtype.kind not in "iub" or (found == values).all() else None
