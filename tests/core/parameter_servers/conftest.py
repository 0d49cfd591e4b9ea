"""Clusters with parameter servers whose tasks may be killed by their chief."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from emulate.cluster import ClusterPlan, Preload
from emulate.topology import Topology
from tests.core.parameter_servers import programs

OnChief = Callable[..., Any]
LIMIT_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """A host needs neither pytest nor the modules of the tests."""
    for module in (request.module, programs):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (request.module, programs):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def on_chief(preload: Preload, tmp_path: Path) -> OnChief:
    """`on_chief("2x1+1ps", function, *args)`: what the chief returned; function(tasks, *args) may kill tasks."""

    def run(topology: str, function: Callable[..., Any], *args: Any) -> Any:
        def entry(_: Any) -> Any:
            return function(programs.Tasks(tmp_path), *args)

        # TensorFlow itself may crash while it repairs the cluster of a killed worker: once in about 500 runs of these tests.
        for attempt in range(2):
            directory = tmp_path / f"run {attempt}"
            directory.mkdir()
            with preload.launch(ClusterPlan(Topology.parse(topology), entry, directory=directory)) as cluster:
                programs.wait_until(lambda: cluster.events(0.1) is not None and cluster.is_over, LIMIT_SECONDS)
            chief = next(outcome for outcome in cluster.outcomes if outcome.host == 0)
            if chief.code != -signal.SIGSEGV:
                break
        errors = (directory / "host-0" / "stderr").read_text()[-6000:]
        assert chief.status == "returned", (chief, errors)
        return chief.value

    return run
