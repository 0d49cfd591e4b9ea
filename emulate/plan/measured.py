"""Read the user's own measurements: `1: 195 examples/s at batch 64`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from emulate.errors import UsageError

_FORM = re.compile(r"\s*(\d+)\s*:\s*(\d+(?:\.\d+)?)\s*examples\s*/\s*s(?:\s+at\s+batch\s+(\d+))?\s*", re.IGNORECASE)
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*examples\s*/\s*s\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Measured:
    """Hold one measurement of the user's.

    Attributes:
        num_gpus: On how many GPUs it was made.
        examples_per_second: Of all GPUs together.
        batch: Examples on each GPU in a step; None for the batch of the recorded run.
    """

    num_gpus: int
    examples_per_second: float
    batch: int | None = None

    def __str__(self) -> str:
        """Return the text as a user writes it."""
        at_batch = "" if self.batch is None else f" at batch {self.batch}"
        return f"{self.num_gpus}: {self.examples_per_second:g} examples/s{at_batch}"


def parse_measured(texts: Sequence[str]) -> tuple[Measured, ...]:
    """Read measurements.

    Args:
        texts: Each `N: X examples/s at batch B`; without `at batch B` the batch of the recorded run.

    Returns:
        The measurements by increasing number of GPUs.

    Raises:
        UsageError: If a text has another form, or two are of one number of GPUs.

    Example:
        >>> parse_measured(["8: 1485 examples/s at batch 32"])[0].examples_per_second
        1485.0
    """
    points: dict[int, Measured] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None or int(match[1]) < 1 or float(match[2]) <= 0 or int(match[3] or 1) < 1:
            raise UsageError(
                "--measured must have the form 'N: X examples/s at batch B', with positive numbers. "
                f"Received: --measured {text!r}. N is the number of GPUs, "
                "B the batch on each. Example: --measured '1: 195 examples/s at batch 64'."
            )
        point = Measured(int(match[1]), float(match[2]), int(match[3]) if match[3] else None)
        if point.num_gpus in points:
            raise UsageError(
                "--measured must be given once for each number of GPUs. "
                f"Received: {str(points[point.num_gpus])!r} and {text!r}. Leave one out."
            )
        points[point.num_gpus] = point
    return tuple(points[count] for count in sorted(points))


def parse_rate(text: str) -> float:
    """Return the rate of `--input-rate`, in examples a second. Raise UsageError for another form than `5000 examples/s`."""
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"--input-rate must have the form 'X examples/s', with a positive number. Received: --input-rate {text!r}. "
            "Example: --input-rate '5000 examples/s'."
        )
    return float(match[1])
