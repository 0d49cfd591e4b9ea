"""Print numbers for readers."""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for a reader: few digits, `?` for none."""
    if value is None:
        return "?"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "infinite"
    return f"{value:.{digits}g}"


def told_apart(value: float | None, other: float | None, digits: int = 6) -> tuple[str, str]:
    """Return two numbers in print, with more digits where the given ones do not tell them apart."""
    texts = number(value, digits), number(other, digits)
    return texts if texts[0] != texts[1] or digits >= 17 else told_apart(value, other, digits + 1)
