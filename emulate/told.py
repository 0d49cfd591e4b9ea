"""Define the sentences of a verdict, each with a code, which scripts can rely on; and print numbers for readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial


class Told(str):
    """Hold a sentence.

    Attributes:
        code: Names its kind, in kebab-case, and never changes. docs/reference/json.md lists all of them.
    """

    __slots__ = ("code",)
    code: str

    def __new__(cls, code: str, text: str) -> Told:  # noqa: PYI034
        """Return the text with its code."""
        sentence = super().__new__(cls, text)
        sentence.code = code
        return sentence

    def __reduce__(self) -> tuple[type[Told], tuple[str, str]]:
        return Told, (self.code, str(self))

    def format(self, *args: object, **kwargs: object) -> Told:
        """Return the sentence with its blanks filled."""
        return Told(self.code, super().format(*args, **kwargs))


def told(code: str) -> Callable[[str], Told]:
    """Return what makes sentences with a code."""
    return partial(Told, code)


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for a reader: few digits, `?` for none."""
    if value is None:
        return "?"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "infinite"
    return f"{value:.{digits}g}"


def counted(count: int, noun: str) -> str:
    """Return `1 step` or `20 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def told_apart(value: float | None, other: float | None, digits: int = 6) -> tuple[str, str]:
    """Return two numbers in print, with more digits where the given ones do not tell them apart."""
    texts = number(value, digits), number(other, digits)
    return texts if texts[0] != texts[1] or digits >= 17 else told_apart(value, other, digits + 1)
