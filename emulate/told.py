"""Define the sentences of a verdict: each has a code, which scripts can rely on."""

from __future__ import annotations

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
