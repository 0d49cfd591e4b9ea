"""The same job gives the same bits first on a fresh cluster and as the hundredth on a warm one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emulate.cluster import HostContext
from emulate.pool import HostResult, Pool
from tests.emulate.pool import programs

HUNDRED = 100
Job = Callable[[HostContext], Any]


def values(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def on_fresh_clusters(pool: Pool, topology: str) -> dict[Job, Any]:
    found = {}
    for job in programs.PROBES:
        with pool.lease(topology, fresh=True) as lease:
            found[job] = values(lease.run(job))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1x2", "2x1"])
def test_the_hundredth_job_gives_the_bits_of_the_first(pool: Pool, topology: str) -> None:
    expected = on_fresh_clusters(pool, topology)
    with pool.lease(topology, fresh=True) as lease:
        values(lease.run(programs.custom_loop))
    before = pool.statistics.replaced
    cheap = [programs.names, programs.settings, programs.kept_function, programs.settings, programs.other_generators]
    for number in range(HUNDRED):
        job = programs.untidy if number % 25 == 7 else cheap[number % len(cheap)]
        with pool.lease(topology) as lease:
            results = lease.run(job)
        assert job is programs.untidy or values(results) == expected[job], number
    for job in programs.PROBES:
        with pool.lease(topology) as lease:
            assert values(lease.run(job)) == expected[job], job.__name__
    assert pool.statistics.replaced == before, pool.statistics.reasons
    assert pool.statistics.reused >= HUNDRED


def test_a_job_that_raised_leaves_the_settings_of_a_fresh_host(pool: Pool) -> None:
    with pool.lease("1x2") as lease:
        expected = values(lease.run(programs.settings))
        [result] = lease.run(programs.untidy)
        assert result.status == "raised"
        assert values(lease.run(programs.settings)) == expected
    assert pool.statistics.started == 1
