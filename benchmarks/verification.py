"""What a verification costs beside the plain program, and what the probe adds to a step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, in_turn, seconds

HERE = Path(__file__).resolve().parent
PROGRAM = str(HERE / "digits_loop.py")


def figures() -> Iterator[Figure]:
    """All figures about verifications."""
    for steps, goal, times in ((40, 2.5, 3), (400, None, 1)):
        ours, theirs = in_turn(lambda n=steps: _verify(n), lambda n=steps: _plain(n), times)
        against = f"the program of {steps} steps run once in a fresh process"
        yield Figure(f"verify_{steps}_steps", ours / theirs, goal, False, ours, theirs, against)
    ours, theirs = _steps()
    yield Figure(
        "probed_step_1x4", ours / theirs, 1.15, False, ours, theirs, "the same step without recording, digits CNN, batch 256"
    )


def _verify(steps: int) -> float:
    command = [sys.executable, "-m", "emulate", "verify", PROGRAM, "--topology", "1x4", "--steps", str(steps), "--", str(steps)]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def _plain(steps: int) -> float:
    return seconds(lambda: subprocess.run([sys.executable, PROGRAM, str(steps)], check=True, capture_output=True))


def _steps() -> tuple[float, float]:
    """Median seconds of a probed and of a plain step, taken in turn in one host."""
    from benchmarks.probed_step import compare
    from emulate.cluster import Cluster

    with Cluster("1x4") as cluster:
        (result,) = cluster.run(compare)
    ours, theirs = result
    return float(ours), float(theirs)
