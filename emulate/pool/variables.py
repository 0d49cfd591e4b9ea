"""Restore context variables that a job set on the main thread."""

from __future__ import annotations

import contextvars
from typing import Any

_NOTHING = object()


class Variables:
    """Hold the context variables at one moment."""

    def __init__(self) -> None:
        self._before = contextvars.copy_context()

    def restore(self) -> list[str]:
        """Put them back; one that was not set gets its default, and without one stays, as nothing can unset it."""
        for variable, value in contextvars.copy_context().items():
            was = self._before[variable] if variable in self._before else _default(variable)
            if was is not value and was is not _NOTHING:
                variable.set(was)
        return []


def _default(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return _NOTHING
