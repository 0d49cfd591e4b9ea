"""Hold what all runs of a verification have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emulate.faults import Fault
from emulate.probe import ProbePlan
from emulate.program import Program
from emulate.verify.step_limit import AUTO, Steps


@dataclass(frozen=True)
class Settings:
    """Hold what is equal for all runs of a verification."""

    program: Program
    seed: int = 0
    steps: Steps = AUTO
    timeout: float = 300.0
    device: str = "cpu"
    network: str = "own"
    all_reduce: str = "auto"
    precision: str = "float32"
    tf_config: bool = False
    reference_args: tuple[str, ...] | None = None
    budget: int = ProbePlan.budget
    faults: tuple[Fault, ...] = ()
    restarts: int = 3
    versions: Mapping[str, str] = field(default_factory=dict)
