"""Parse faults from text (`kill:host=1,step=5,phase=all-reduce`), and check which faults a topology can have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from emulate.errors import UsageError
from emulate.faults.values import EXAMPLES, KINDS, AtStep, Disconnect, Fault, Fired, Link, Missing
from emulate.topology import Topology


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
    read, wanted = _READERS.get(key, (str, "a text"))
    try:
        return allowed[key].name, read(value)
    except ValueError:
        raise UsageError(
            f"A fault's {key} must be {wanted}. Received: fault={text!r}, {item.strip()!r} in it. "
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


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "host": (int, "a whole number"),
    "step": (int, "a whole number"),
    "seconds": (seconds, "a time"),
    "latency": (seconds, "a time"),
    "factor": (_finite, "a number"),
    "loss": (_part, "a percentage"),
}
"""The function that reads each value, and what the user must give. All other values are texts."""


def _near(name: str, choices: Collection[str]) -> str:
    near = difflib.get_close_matches(name, choices, 1)
    return f"Did you mean {near[0]!r}?" if near else f"There is {', '.join(choices)}."


def check_for(faults: Sequence[Fault], topology: Topology) -> None:
    """Check that these faults can be injected into this topology.

    Args:
        faults: All of a run.
        topology: Its shape.

    Raises:
        UsageError: When a fault names a host or a link that is not there.
    """
    count = topology.num_hosts + topology.num_ps + bool(topology.num_ps)
    for fault in faults:
        received = f"Received: fault={str(fault)!r}, topology={str(topology)!r}"
        host = getattr(fault, "host", None)
        if host is not None and host >= count:
            have = "host 0 alone" if count == 1 else f"hosts 0 to {count - 1}"
            raise UsageError(f"The host of a fault must exist. {received}, which has {have}. Name one of them.")
        if isinstance(fault, (Link, Disconnect)) and count == 1:
            raise UsageError(f"A link needs several hosts. {received}, which has one host. Use a topology with several hosts.")
        if isinstance(fault, Missing) and count == 1:
            raise UsageError(
                f"At least one host must start. {received}, which has one host. Use a topology with several hosts."
            )
        if isinstance(fault, AtStep) and topology.num_ps:
            raise UsageError(
                f"A fault in a step needs hosts that train synchronously. {received}, with parameter servers. "
                "Use missing, late or link."
            )


def check_fired(faults: Sequence[Fault], fired: Sequence[Fired]) -> None:
    """Check that every fault came to pass: a test of a fault that never did tests nothing.

    Args:
        faults: All of a run.
        fired: Those that came to pass.

    Raises:
        UsageError: When one did not.
    """
    there = {event.number for event in fired}
    for number, fault in enumerate(faults):
        if number not in there:
            raise UsageError(never_fired(fault))


def never_fired(fault: Fault, held: int | None = None) -> str:
    """Return the message about a fault that did not occur.

    Args:
        fault: The fault.
        held: The step after which its run was held; None where it was not.

    Returns:
        Two sentences or three.
    """
    phase, step = getattr(fault, "phase", ""), getattr(fault, "step", 0)
    if held is not None and step > held:
        return (
            f"A fault must happen. Received: fault={str(fault)!r}, which did not happen: gpudist stops every run after "
            f"step {held}. Use --steps {step} or more, or --steps all."
        )
    how = (
        "gpudist sees checkpoints of gpudist_core, tf.train and Keras"
        if phase == "checkpoint"
        else "gpudist counts the steps of optimizers of Keras and TensorFlow"
    )
    return (
        f"A fault must happen. Received: fault={str(fault)!r}, which did not happen: the program ended before ({how}). "
        "Use an earlier step or another phase."
    )


def needs_links(faults: Sequence[Fault]) -> bool:
    """Return whether the hosts need links that can be cut and slowed down."""
    return any(isinstance(fault, (Link, Disconnect)) for fault in faults)
