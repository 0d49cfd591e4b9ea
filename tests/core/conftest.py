"""What the tests of gpudist_core share: clusters of any topology, forked from one process that has imported TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from emulate.cluster import Cluster, Preload

OnHosts = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def loaded() -> Iterator[Preload]:
    """A parent that has imported TensorFlow and Keras."""
    with Preload() as preload:
        yield preload


@pytest.fixture
def on_hosts(loaded: Preload) -> OnHosts:
    """`on_hosts("2x2", function, *args)`: what it returned on each host, in order."""

    def run(topology: str, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        with Cluster(topology, preload=loaded, timeout=timeout) as cluster:
            return cluster.run(function, *args)

    return run
