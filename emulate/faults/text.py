"""Parse faults from text: `kill:host=1,step=5,phase=all-reduce`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from emulate.errors import UsageError
from emulate.faults.values import EXAMPLES, KINDS, Fault


def parse(text: str | Fault) -> Fault:
    """Return the fault that a text names. A fault is returned unchanged.

    Args:
        text: `KIND:NAME=VALUE,NAME=VALUE`. Times are in seconds, or as `20ms`, `5s`, `1min`; a loss is `1%` or `0.01`.

    Returns:
        The fault.

    Raises:
        UsageError: If the text is not a fault. The message says what is possible.

    Example:
        >>> parse("kill:host=1,step=5,phase=all-reduce")
        Kill(host=1, step=5, phase='all-reduce')
        >>> str(parse("link:latency=20ms,loss=1%"))
        'link:latency=20ms,loss=1%'
    """
    if isinstance(text, Fault):
        return text
    if not isinstance(text, str):
        raise UsageError(
            f"A fault must be a text, or one of emulate.faults. Received: faults={text!r}. Write {EXAMPLES['kill']!r}, say."
        )
    name, _, rest = text.strip().partition(":")
    if name not in KINDS:
        raise UsageError(f"A fault must begin with its kind. Received: fault={text!r}. {_near(name, KINDS)}")
    kind = KINDS[name]
    allowed = {field.name.replace("_", "-"): field for field in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in (_item(text, name, item, allowed) for item in rest.split(",") if item.strip()):
        if key in given:
            raise UsageError(
                f"A fault must say each of its values once. Received: fault={text!r}, with {key} twice. Leave one out."
            )
        given[key] = value
    lacking = [field.name for field in allowed.values() if field.default is MISSING and field.name not in given]
    if lacking:
        raise UsageError(f"A fault must say its {lacking[0]}. Received: fault={text!r}. Write it as in {EXAMPLES[name]!r}.")
    return kind(**given)


def parse_all(faults: str | Fault | Iterable[str | Fault]) -> tuple[Fault, ...]:
    """Return the faults that texts name. A single text or fault is allowed."""
    if isinstance(faults, (str, Fault)) or not isinstance(faults, Iterable):
        return (parse(faults),)
    return tuple(parse(fault) for fault in faults)


def _item(text: str, kind: str, item: str, allowed: dict[str, Field[Any]]) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals or key not in allowed:
        raise UsageError(
            f"A {kind} takes {', '.join(allowed)}. Received: fault={text!r}, {item.strip()!r} in it. {_near(key, allowed)}"
        )
    try:
        return allowed[key].name, _READERS.get(key, str)(value)
    except ValueError:
        raise UsageError(
            f"A fault's {key} must be {_WANTED[key]}. Received: fault={text!r}, {item.strip()!r} in it. "
            f"Write it as in {EXAMPLES[kind]!r}."
        ) from None


def seconds(text: str) -> float:
    """Return a duration in seconds: `20ms`, `5s`, `1min`, `1.5`. Raise ValueError for any other text."""
    for unit, size in (("ms", 1e-3), ("min", 60.0), ("s", 1.0)):
        if text.endswith(unit):
            return _finite(text[: -len(unit)]) * size
    return _finite(text)


def _part(text: str) -> float:
    return _finite(text[:-1]) / 100 if text.endswith("%") else _finite(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_READERS: dict[str, Any] = {
    "host": int,
    "step": int,
    "seconds": seconds,
    "latency": seconds,
    "factor": _finite,
    "loss": _part,
}
_WANTED = {
    "host": "a whole number",
    "step": "a whole number",
    "seconds": "a time",
    "latency": "a time",
    "factor": "a number",
    "loss": "a percentage",
}


def _near(name: str, choices: Iterable[str]) -> str:
    names = list(choices)
    near = difflib.get_close_matches(name, names, 1)
    return f"Did you mean {near[0]!r}?" if near else f"There is {', '.join(names)}."
