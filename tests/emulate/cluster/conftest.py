"""What the tests of clusters share: parents to fork from, entries sent by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from emulate.cluster import ClusterPlan, Preload, RunningCluster
from emulate.topology import Topology
from tests.emulate.cluster.helpers import Ran, events_until


@pytest.fixture(scope="session")
def bare() -> Iterator[Preload]:
    """A parent that has not imported TensorFlow: hosts that need none are there in milliseconds."""
    with Preload(imports=False) as preload:
        yield preload


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """A host needs neither pytest nor the module of the test."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def launch(bare: Preload, tmp_path: Path) -> Callable[..., RunningCluster]:
    """Launch an entry on a topology."""

    def start(topology: str, entry: Callable[..., Any], preload: Preload = bare, **options: Any) -> RunningCluster:
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        return preload.launch(ClusterPlan(Topology.parse(topology), entry, **{"directory": directory, **options}))

    return start


@pytest.fixture
def run(launch: Callable[..., RunningCluster]) -> Callable[..., Ran]:
    """Run an entry to its end on a topology."""

    def go(topology: str, entry: Callable[..., Any], preload: Preload | None = None, **options: Any) -> Ran:
        with launch(topology, entry, **({} if preload is None else {"preload": preload}), **options) as cluster:
            events = events_until(cluster, lambda _: cluster.is_over)
        outcomes = {outcome.host: outcome for outcome in cluster.outcomes}
        return Ran(outcomes, events, cluster.isolation, cluster.notes, cluster.plan.directory)

    return go
