"""Run a program of the collection with plain TensorFlow, and keep what the alternatives look at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fixtures.corpus.index import Program

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 120.0
_NUMBER = r"(-?\d+\.\d+(?:e[-+]?\d+)?|nan)"
_LOSSES = re.compile(rf"\bloss: {_NUMBER}"), re.compile(_NUMBER)
"""Keras's last log of a loss, else the last number."""


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        has_ended: Whether it ended by itself, without an error.
        loss: The last loss that it printed; None without one.
        copies: Of each host and replica its final weights, in the order in which they were made.
        seconds: How long it took.
    """

    has_ended: bool
    loss: float | None
    copies: Mapping[tuple[int, int], list[NDArray[np.float64]]]
    seconds: float

    @property
    def weights(self) -> list[NDArray[np.float64]]:
        """Return the weights of the first replica."""
        return self.copies.get((0, 0), [])


def run(program: Program, topology: str, arguments: tuple[str, ...] = ()) -> Run:
    """Run a program on a topology of logical CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--topology", topology, "--weights", folder, "--timeout", str(TIME_LIMIT)]
        command = [sys.executable, "-m", "fixtures.corpus", "run", program.id, *options, *arguments]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        copies: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
        for path in sorted(Path(folder).glob("host-*.npz")):
            with np.load(path, allow_pickle=True) as kept:
                for name in kept.files:
                    if kept[name].dtype.kind in "fiub":
                        place = int(path.stem.rpartition("-")[2]), int(name.partition("/")[0])
                        copies.setdefault(place, []).append(kept[name].astype(np.float64))
    printed = "\n".join(line for line in done.stdout.splitlines() if not _is_json(line))
    losses = next((found for form in _LOSSES if (found := form.findall(printed))), [])
    return Run(done.returncode == 0, float(losses[-1]) if losses else None, copies, seconds)


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
