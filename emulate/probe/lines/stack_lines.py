"""Find the user's lines on the stack of a call, or of an operation of a graph, also through autograph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emulate.probe.lines import upstream
from emulate.probe.point import around
from emulate.program import users

Frames = Sequence[tuple[str, int]]
_ORIGINS: dict[tuple[str, int], tuple[str, int]] = {}
"""Lines of functions that autograph has converted, with the user's: threads of MirroredStrategy have no map of them."""


def install() -> None:
    """Remember what autograph makes of which lines."""
    module, name = upstream.converter()

    @around(module, name)
    def convert(original: Any, *args: Any, **kwargs: Any) -> Any:
        converted = original(*args, **kwargs)
        _ORIGINS.update(upstream.origins_of(converted))
        return converted


def here() -> Frames:
    """Return the user's lines of this thread's calls, outermost first."""
    return _users(upstream.stack())


def of_operation(operation: Any) -> Frames:
    """Return the user's lines that made an operation, outermost first."""
    own = getattr(operation, "frames", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    # An operation of a loaded SavedModel's function has no traceback (TF 2.21).
    return _users([(frame.filename, frame.lineno) for frame in operation.traceback or ()])


def _users(frames: Frames) -> Frames:
    return tuple(users(_ORIGINS.get(frame, frame) for frame in frames))
