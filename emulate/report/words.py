"""Define the words, marks and numbers of the reports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from emulate.digits import number

if TYPE_CHECKING:
    from emulate.verify.verdict import Difference


MARKS = {
    "equivalent": "✔",
    "by-design": "!",
    "divergent": "✘",
    "failed": "✘",
    "hung": "✘",
    "unverified": "?",
    "unavailable": "-",
}
STYLES = {
    "equivalent": "bold green",
    "by-design": "bold yellow",
    "divergent": "bold red",
    "failed": "bold red",
    "hung": "bold red",
    "unverified": "bold yellow",
    "unavailable": "bold yellow",
}
COLOURS = {
    "equivalent": "#2b8a3e",
    "by-design": "#a36a00",
    "divergent": "#c92a2a",
    "failed": "#c92a2a",
    "hung": "#c92a2a",
    "unverified": "#a36a00",
    "unavailable": "#a36a00",
}
DIVERGES = ("divergent", "by-design")
"""The verdicts of runs that differ from the reference."""
_KINDS = {
    "gradient": "the gradient of {}",
    "weight": "the weight {}",
    "variable": "the variable {}",
    "initial-weight": "the initial weight {}",
    "final-weight": "the final weight {}",
}


def tensor(difference: Difference) -> str:
    """Return what differs: `the gradient of dense/kernel`."""
    return _KINDS.get(difference.kind, difference.kind + " {}").format(difference.tensor)


def where(difference: Difference) -> str:
    """Return where it differs: `at step 3, replica 1, optimizer adam`, `at report 1 (after step 15)`, `after all 16 steps`."""
    step = f"step {difference.step}"
    parts = [f"at {step}" if difference.report is None else f"at report {difference.report} (after {step})"]
    if difference.kind == "final-weight":
        parts = [f"after all {one_of(difference.step, 'step')}"]
    for name in ("replica", "host", "optimizer"):
        value = getattr(difference, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def against_noise(difference: Difference) -> str:
    """Return the error and its ratio: `error 0.38, 3.8e+06 times the noise (1e-07)`."""
    if difference.non_finite:
        return "not finite"
    error, noise = difference.error, difference.noise
    if not noise or not math.isfinite(error / noise):
        return f"error {number(error)}, noise {number(noise)}"
    return f"error {number(error)}, {number(error / noise)} times the noise of {number(noise)}"


def one_of(count: int, noun: str) -> str:
    """Return `1 step` or `20 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
