"""Every correct program is equivalent on every topology that its strategy allows."""

from __future__ import annotations

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import PROGRAMS, Fixture


@pytest.mark.parametrize("fixture", PROGRAMS, ids=lambda fixture: fixture.name)
def test_a_correct_program_is_equivalent_on_every_topology_of_its_strategy(fixture: Fixture, preload: Preload) -> None:
    verdict = emulate.verify(fixture.path, fixture.topologies, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["equivalent"] * len(fixture.topologies), render(verdict)
    assert verdict.exit_code == 0
    assert verdict.reference.repeatable
    for run in verdict.runs:
        assert run.steps == 20
        assert run.first_divergence is None
        assert run.samples.missing == run.samples.repeated == 0
        assert run.samples.reference == run.samples.seen > 0
