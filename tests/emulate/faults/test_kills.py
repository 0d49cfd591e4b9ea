"""A host that is killed at any moment is reported by name, nothing of its cluster is left, and the next run is well."""

from __future__ import annotations

import cloudpickle
import pytest

from benchmarks import kills
from emulate import Cluster
from emulate.cluster import Preload


@pytest.mark.parametrize(("host", "moment"), [(0, 0.0), pytest.param(1, 0.5, marks=pytest.mark.slow), (0, 3.0)])
def test_a_killed_host_is_reported_and_the_next_run_is_well(preload: Preload, host: int, moment: float) -> None:
    cloudpickle.register_pickle_by_value(kills)
    try:
        with Cluster("2x1", preload=preload) as cluster:
            kill = kills.kill_once(cluster, host, moment)
    finally:
        cloudpickle.unregister_pickle_by_value(kills)
    assert kill.host == host
    assert kill.seconds < 30  # what is promised is measured by the benchmark
