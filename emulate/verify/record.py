"""Record a program for a few steps on one device, for what is not a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from emulate.probe import ProbePlan, fixed_batches, refusal
from emulate.program import Program
from emulate.topology import REFERENCE
from emulate.verify.result import RunResult
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings

if TYPE_CHECKING:
    from emulate.progress import Progress


def record(
    program: Program, folder: Path, operations: Path, *, steps: int, timeout: float, progress: Progress
) -> tuple[RunResult, tuple[str, ...]]:
    """Record a program on one device of the CPU, and count the operations and the live bytes of its step.

    Args:
        program: What to run.
        folder: An existing folder for the trace.
        operations: The file for the operations. None is written where the steps are not in a graph.
        steps: After how many steps it is stopped.
        timeout: The time limit in seconds.
        progress: Told of the run.

    Returns:
        How the run went, and what the user should know about it.
    """
    settings = Settings(program=program, steps=steps, timeout=timeout)
    with Runner(settings, folder, progress) as runner:
        runner.expect(2)
        plan = ProbePlan(folder, keeps_functions=True, times_input=True)
        result = runner.start("one device", REFERENCE, plan, reference=True).result()
        if result.status == "ok" and result.trace is not None and refusal(result.trace) is None:
            half = _half(runner, folder) if fixed_batches(result.trace) else None
            runner.count_operations(result, half, operations)
        return result, tuple(runner.notes())


def _half(runner: Runner, folder: Path) -> RunResult | None:
    """Run the program with half of each batch: its graphs show which tensors grow with it. None where that is not possible."""
    plan = ProbePlan(folder, keeps_functions=True, halves=True)
    result = runner.start("half the batch", REFERENCE, plan, reference=True).result()
    return result if result.status == "ok" and result.trace is not None and refusal(result.trace) is None else None
