"""What the tests of faults share: one pre-loaded parent, functions sent by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from emulate import Cluster
from emulate.cluster import Preload


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """A host needs neither pytest nor the module of the test."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def cluster(preload: Preload, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make a cluster whose hosts know a folder of the test as WHERE."""
    made: list[Cluster] = []

    def make(topology: str, **options: object) -> Cluster:
        made.append(Cluster(topology, environment={"WHERE": str(tmp_path)}, preload=preload, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
