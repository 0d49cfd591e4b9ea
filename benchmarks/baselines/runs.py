"""Run a program of the collection with plain TensorFlow, and keep what the alternatives look at."""

from __future__ import annotations

import json
import os
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
SCRIPTS = Path(__file__).resolve().parent / "scripts"
WATCHED, ONE_STEP = "replicas", "one_step"
"""The scripts that run before a program: it trains as ever and is watched, or it makes one step."""
TIME_LIMIT = 120.0
_NUMBER = r"(-?\d+\.\d+(?:e[-+]?\d+)?|nan)"
_LOSSES = re.compile(rf"\bloss: {_NUMBER}"), re.compile(_NUMBER)
"""Keras's last log of a loss, else the last number."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        has_ended: Whether it ended by itself, without an error.
        loss: The last loss that it printed; None without one.
        copies: Of each host and replica its final weights, in the order in which they were made.
        steps: Of each replica its loss and its gradient before the sum, each time that it asked a tape.
        has_optimizer: Whether an optimizer made the one step of `ONE_STEP`.
        seconds: How long it took.
    """

    has_ended: bool
    loss: float | None
    copies: Mapping[tuple[int, int], list[Array]]
    steps: Mapping[int, list[tuple[float, Array]]]
    has_optimizer: bool
    seconds: float

    @property
    def weights(self) -> list[Array]:
        """Return the weights of the first replica."""
        return self.copies.get((0, 0), [])


def run(program: Program, topology: str, script: str) -> Run:
    """Run a program on a topology of logical CPUs, with one of the scripts before it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--topology", topology, "--weights", folder, "--timeout", str(TIME_LIMIT)]
        options += ["--before", str(SCRIPTS / f"{script}.py")]
        command = [sys.executable, "-m", "fixtures.corpus", "run", program.id, *options]
        environment = {**os.environ, "BASELINES_FOLDER": folder}
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        printed = "\n".join(line for line in done.stdout.splitlines() if not _is_json(line))
        losses = next((found for form in _LOSSES if (found := form.findall(printed))), [])
        return Run(
            done.returncode == 0,
            float(losses[-1]) if losses else None,
            _copies(Path(folder)),
            _steps(Path(folder)),
            Path(folder, "asked").exists(),
            seconds,
        )


def _copies(folder: Path) -> dict[tuple[int, int], list[Array]]:
    copies: dict[tuple[int, int], list[Array]] = {}
    for path in sorted(folder.glob("host-*.npz")):
        with np.load(path, allow_pickle=True) as kept:
            for name in kept.files:
                if kept[name].dtype.kind in "fiub":
                    place = int(path.stem.rpartition("-")[2]), int(name.partition("/")[0])
                    copies.setdefault(place, []).append(kept[name].astype(np.float64))
    return copies


def _steps(folder: Path) -> dict[int, list[tuple[float, Array]]]:
    steps: dict[int, list[tuple[float, Array]]] = {}
    for path in folder.glob("replicas-*.npz"):
        with np.load(path) as kept:
            for name in kept.files:
                replica, number, kind = name.split("/")
                if kind == "loss":
                    gradient = kept[f"{replica}/{number}/gradient"].astype(np.float64)
                    steps.setdefault(int(replica), []).append((float(kept[name]), gradient))
    return steps


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
