"""What the tests of gpudist_core share: clusters of any topology, forked from one process that has imported TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emulate.cluster import Cluster, Preload

OnHosts = Callable[..., list[Any]]


@pytest.fixture
def on_hosts(preload: Preload) -> OnHosts:
    """`on_hosts("2x2", function, *args)`: what it returned on each host, in order."""

    def run(topology: str, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        with Cluster(topology, preload=preload, timeout=timeout) as cluster:
            return cluster.run(function, *args)

    return run
