"""Every correct program is equivalent on every topology that its strategy allows."""

from __future__ import annotations

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import PROGRAMS, Fixture

TELLING = ("1x3", "2x2")  # replicas that share unevenly; several hosts with several devices


@pytest.mark.parametrize("fixture", PROGRAMS, ids=lambda fixture: fixture.name)
def test_a_correct_program_is_equivalent_on_uneven_replicas_and_on_several_hosts(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, [one for one in fixture.topologies if one in TELLING], preload)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", PROGRAMS, ids=lambda fixture: fixture.name)
def test_a_correct_program_is_equivalent_on_every_topology_of_its_strategy(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, [one for one in fixture.topologies if one not in TELLING], preload)


def _check(fixture: Fixture, topologies: list[str], preload: Preload) -> None:
    verdict = emulate.verify(fixture.path, topologies, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["equivalent"] * len(topologies) != [], render(verdict)
    assert verdict.exit_code == 0
    assert verdict.reference.repeatable
    for run in verdict.runs:
        assert run.steps == 20
        assert run.first_divergence is None
        assert run.samples.missing == run.samples.repeated == 0
        assert run.samples.reference == run.samples.seen > 0
