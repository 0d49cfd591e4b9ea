"""What a verdict takes of memory at its peak, beside the sum of its two runs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from benchmarks.cost import HERE, TOPOLOGY
from benchmarks.figure import Figure

_OFTEN = 0.1
_GOAL = 1.3
_PROGRAMS = (
    ("digits_loop", "equivalent"),
    ("transformer", "equivalent"),
    ("mobilenet_fit", "by-design"),
    ("dense", "equivalent"),
)


def figures() -> Iterator[Figure]:
    """The peaks of all processes together, shared pages counted once (PSS)."""
    for name, variant in _PROGRAMS:
        program = str(HERE / f"{name}.py")
        plain = peak([program, variant])
        alone = peak(["-m", "emulate", "run", program, "--topology", TOPOLOGY, "--", variant])
        taken = peak(["-m", "emulate", "verify", program, "--topology", TOPOLOGY, "--steps", "all", "--", variant])
        against = f"the program alone ({plain:.2f} GB) and on {TOPOLOGY} ({alone:.2f} GB)"
        ratio = taken / (plain + alone)
        yield Figure(f"memory_{name}_{variant}", ratio, _GOAL, False, taken, plain + alone, against, of="GB")


def peak(arguments: list[str], code: int = 0) -> float:
    """Return the largest PSS of a command and all its descendants, in GB.

    Args:
        arguments: Of Python.
        code: The exit code that it must have.
    """
    command = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root, most = psutil.Process(command.pid), 0
    while command.poll() is None:
        total = 0
        for process in _with_descendants(root):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                total += process.memory_full_info().pss
        most = max(most, total)
        time.sleep(_OFTEN)
    if command.returncode != code:
        raise SystemExit(f"{' '.join(arguments)} must exit with {code}. Received: exit code {command.returncode}.")
    return most / 1e9


def _with_descendants(root: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [root, *root.children(recursive=True)]
    return []
