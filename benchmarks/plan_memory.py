"""How well `gpudist plan` forecasts the memory of a step: beside the peak of live bytes that RunMetadata shows on one CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure
from emulate.plan import StepMemory, read_recorded
from emulate.program import Program
from emulate.report import progress_on
from emulate.verify.api import record

_COST = Path(__file__).resolve().parent / "cost"
_PROGRAMS = {
    "cnn_adam": ("-m", "benchmarks.adam_step", "cnn"),
    "resnet50_sgd": (f"{_COST / 'resnet50.py'}", "by-design"),
    "resnet50_adam": ("-m", "benchmarks.adam_step", "resnet50"),
    "transformer_adam": (f"{_COST / 'transformer.py'}", "equivalent"),
}
_GOAL = 10.0


def figures() -> Iterator[Figure]:
    """Yield the error of what lives beside the variables, in percent. The variables' size is known exactly."""
    for name, arguments in _PROGRAMS.items():
        forecast, measured = _forecast(arguments), _measured(arguments)
        error = 100 * abs(forecast / measured - 1)
        against = "RunMetadata's allocations, one inter-op thread"
        yield Figure(f"plan_memory_{name}", error, _GOAL, False, forecast / 1e6, measured / 1e6, against, unit="%", of="MB")


def _forecast(arguments: tuple[str, ...]) -> float:
    target, own = (" ".join(arguments[:2]), arguments[2:]) if arguments[0] == "-m" else (arguments[0], arguments[1:])
    with tempfile.TemporaryDirectory() as folder, progress_on() as progress:
        operations = Path(folder) / "operations" / "operations.json"
        operations.parent.mkdir()
        result, _ = record(Program.find(target, own), Path(folder), operations, steps=2, timeout=600, progress=progress)
        if result.trace is None:
            raise SystemExit(f"{target} must be recorded. Received: {result.failure}.")
        recorded = read_recorded(result.trace, operations)
    memory = recorded.memory
    if memory is None:
        raise SystemExit(f"{target} must have a graph. Received: none.")
    return peak(memory, recorded.batch)


def peak(memory: StepMemory, batch: int) -> float:
    """Return what lives at the peak on one device beside variables, constants and input, in bytes."""
    return max(fixed + each * batch for fixed, each, _ in memory.peaks)


def _measured(arguments: tuple[str, ...]) -> float:
    program = arguments[1:] if arguments[0] == "-m" else arguments
    command = [sys.executable, "-m", "benchmarks.live_bytes", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} must end well. Received: {done.returncode}.\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])
