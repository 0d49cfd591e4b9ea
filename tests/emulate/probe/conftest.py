"""Runs a function of a test in real hosts under the probe and gives its trace back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import Preload
from emulate.program import Program
from emulate.progress import Silent
from emulate.recorder import ProbePlan
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.result import RunResult
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings

Recorded = Callable[..., Trace]


@pytest.fixture
def run(preload: Preload, tmp_path: Path) -> Callable[..., RunResult]:
    """run(function, topology="1x2", steps=4, **fields of ProbePlan) -> RunResult."""
    count = iter(range(100))

    def make(function: Callable[[], Any], topology: str = "1x2", *, steps: int | None = 4, **fields: Any) -> RunResult:
        settings = Settings(program=Program.find(function), steps=steps, timeout=60)
        reference = fields.pop("reference", False)
        with Runner(settings, tmp_path, Silent(), preload=preload) as runner:
            plan = ProbePlan(trace=tmp_path, **fields)
            return runner.start(f"run {next(count)}", Topology.parse(topology), plan, reference=reference).result()

    return make


@pytest.fixture(scope="module")
def recordings() -> dict[Any, Trace]:
    """What the tests of a module have recorded: nobody changes a trace, so that they share it."""
    return {}


@pytest.fixture
def recorded(run: Callable[..., RunResult], recordings: dict[Any, Trace]) -> Recorded:
    """The same for runs that end well: their trace. A function that was run in the same way before is not run again."""

    def make(function: Callable[[], Any], topology: str = "1x2", **fields: Any) -> Trace:
        key = (function, topology, repr(sorted(fields.items())))
        if key not in recordings:
            result = run(function, topology, **fields)
            assert result.status == "ok", result.failure or result.where
            assert result.trace is not None
            recordings[key] = result.trace
        return recordings[key]

    return make
