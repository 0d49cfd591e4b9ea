"""What a value is, where a user gives a number: of Python or NumPy, and never a truth value."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard


def is_whole(value: Any, least: float = -math.inf) -> TypeGuard[int]:
    """Whether a value is a whole number, not below another."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_finite(value: Any, least: float = -math.inf) -> TypeGuard[float]:
    """Whether a value is a finite number, not below another."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= least
