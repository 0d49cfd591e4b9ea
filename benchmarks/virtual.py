"""What a verdict on many virtual replicas takes, of a right program and of one that divides by a replica's examples."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, seconds
from benchmarks.memory import peak

PROGRAM = str(Path(__file__).resolve().parent / "digits_mlp.py")
_GOALS = {"1x1024": (300.0, 8.0), "128x8": (900.0, None)}
"""Seconds and GB by topology."""


def figures() -> Iterator[Figure]:
    """Measure seconds and memory of the whole command, beside those of the plain program on one device."""
    for topology, goals in _GOALS.items():
        for variant in ("equivalent", "divergent"):
            arguments = [*(["hosts"] if topology == "128x8" else []), variant]
            (taken, memory), (plain, alone) = _verify(topology, arguments), _measured([PROGRAM, *arguments], 0)
            name, against = f"virtual_{topology}_{variant}", "the program on one device"
            yield Figure(name, taken, goals[0], False, taken, plain, against, unit="s")
            yield Figure(f"{name}_memory", memory, goals[1], False, memory, alone, against, unit="GB", of="GB")


def _verify(topology: str, arguments: list[str]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdict.json")
        options = ["--topology", topology, "--virtual", "--steps", "5", "--timeout", "900", "--json", str(written)]
        found = _measured(["-m", "emulate", "verify", PROGRAM, *options, "--", *arguments], int("divergent" in arguments))
        (run,) = json.loads(written.read_text())["runs"]
    if run["verdict"] not in arguments:
        raise SystemExit(f"{topology} must be {arguments[-1]}. Received: {run['verdict']}.")
    return found


def _measured(arguments: list[str], code: int) -> tuple[float, float]:
    """Return the seconds and the GB of a command that ends with an exit code."""
    memory: list[float] = []
    return seconds(lambda: memory.append(peak(arguments, code))), memory[0]
