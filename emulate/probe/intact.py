"""Validate a trace that comes from elsewhere: a folder may be changed or cut off by copying."""

from __future__ import annotations

from typing import Any

from emulate.probe.trace import Trace

_ABOUT = {"program": str, "seed": int, "precision": str, "device": str, "versions": dict}
_EVENTS = {
    "strategy": ("name", "replicas"),
    "streams": ("streams",),
    "seeded": ("generator",),
    "shared": ("name",),
    "left": ("changed",),
    "end": ("reason",),
}
"""Keys of each event that are read later. Steps, variables and reports are read here."""


def check_intact(trace: Trace) -> None:
    """Read all of a trace but its arrays.

    Args:
        trace: The trace.

    Raises:
        ValueError: When something in it is not as it was written.
    """
    for name, kind in _ABOUT.items():
        if not isinstance(trace.about.get(name), (kind, type(None))):
            raise ValueError(f"trace.json has {name} {trace.about[name]!r}")
    try:
        for _, event in trace.events:
            _check_event(event)
        for name in trace.optimizers:
            trace.steps(name)
        _ = trace.reports, *map(trace.variables, ("initial", "final", "left"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an event lacks something, or has it in another form ({type(error).__name__}: {error})") from error


def _check_event(event: dict[str, Any]) -> None:
    for name in _EVENTS.get(event["event"], ()):
        event[name]
